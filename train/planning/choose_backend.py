"""Chooses the backend: the one that the config or the model names, otherwise the strategy's first."""

from __future__ import annotations

from shardmill.errors import UsageError
from train.backends import BACKENDS
from train.config import TrainConfig
from train.models.modules import no_module
from train.models.user import framework_of, imported_packages
from train.strategies import STRATEGIES, fitting_strategies


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
    check_is_module(config)
    BACKENDS.usable(name)
    return name


def check_is_module(config: TrainConfig) -> None:
    """Raises UsageError for a Keras model with a strategy that needs a module.

    A factory that imports PyTorch too may return either; it is known when it is built, which is also before the ETL.
    """
    packages = imported_packages(config)
    if STRATEGIES[config.strategy].needs_module and "torch" not in packages and packages & {"keras", "tensorflow"}:
        raise no_module(config)
