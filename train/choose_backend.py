"""Which backend trains: what the config names, else what strategy and model say; known before anything is imported."""

from __future__ import annotations

from shardmill.errors import UsageError
from train.backends import BACKENDS
from train.config import TrainConfig
from train.models.user import imported_packages
from train.strategies import STRATEGIES, fitting_strategies


def framework_of(config: TrainConfig) -> str:
    """The backend that config and model leave no choice about; empty if any would do: pure, and imports no framework.

    A factory that imports PyTorch and not Keras needs `torch`.
    """
    if config.backend != "auto":
        return config.backend
    packages = imported_packages(config.model)
    return "torch" if "torch" in packages and not packages & {"keras", "tensorflow"} else ""


def choose_backend(config: TrainConfig) -> str:
    """The backend's name. Raises UsageError if the strategy does not run with it, or its packages are missing.

    What neither config nor model decides takes the strategy's first backend.
    """
    backends = STRATEGIES[config.strategy].backends
    name = framework_of(config) or backends[0]
    if name not in backends:
        others = fitting_strategies(name, config.num_workers)
        raise UsageError(
            f"train.strategy = {config.strategy!r} with the backend {name!r}"
            + (f", which train.model = {config.model!r} needs" if config.backend == "auto" else ""),
            f"it runs with {' and '.join(backends)}",
            f"set train.strategy to {' or '.join(map(repr, others))}" if others else "set train.backend = 'auto'",
        )
    BACKENDS.usable(name)
    return name
