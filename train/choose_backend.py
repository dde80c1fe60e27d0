"""Which backend trains: what the config names, else what strategy and model say; known before anything is imported."""

from __future__ import annotations

from shardmill.errors import UsageError
from train.backends import BACKENDS
from train.config import TrainConfig
from train.models.user import imported_packages
from train.strategies import STRATEGIES


def with_backend(config: TrainConfig) -> TrainConfig:
    """`config` with `auto` replaced: strategies may differ between attempts at one training, the framework may not."""
    return config.model_copy(update={"backend": choose_backend(config)})


def choose_backend(config: TrainConfig) -> str:
    """The backend's name. Raises UsageError if the strategy does not run with it, or its packages are missing.

    Under `auto` a model of ours, or a factory that imports Keras, takes the strategy's first backend; a factory that
    imports PyTorch and not Keras takes `torch`.
    """
    backends = STRATEGIES[config.strategy].backends
    name = config.backend
    if name == "auto":
        packages = imported_packages(config.model)
        name = "torch" if "torch" in packages and not packages & {"keras", "tensorflow"} else backends[0]
    if name not in backends:
        installed = [each for each, entry in STRATEGIES.entries.items() if not entry.missing_packages()]
        others = [each for each in installed if name in STRATEGIES[each].backends]
        raise UsageError(
            f"train.strategy = {config.strategy!r} with the backend {name!r}"
            + (f", which train.model = {config.model!r} needs" if config.backend == "auto" else ""),
            f"it runs with {' and '.join(backends)}",
            f"set train.strategy to {' or '.join(map(repr, others))}" if others else "set train.backend = 'auto'",
        )
    BACKENDS.usable(name)
    return name
