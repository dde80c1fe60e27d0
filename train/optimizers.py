"""The optimizers that can be named; a new one is an `Optimizer` and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An update rule in each framework that has it, at the base learning rate of section `train`."""

    keras: Callable[[TrainConfig], Any] | None = None
    """-> a Keras optimizer. It clips by `train.gradient_clip_norm` itself."""
    torch: Callable[[TrainConfig, list[dict[str, Any]]], Any] | None = None
    """(section `train`, weights in parameter groups) -> a `torch.optim.Optimizer`. What weight decay leaves alone is a
    group with `weight_decay` 0."""
    momentum: float | None = None
    """Value of `train.momentum = "auto"`; None if the optimizer has no such parameter."""
    weight_decay: float | None = None
    """Value of `train.weight_decay = "auto"`, likewise."""


OPTIMIZERS: Registry[Optimizer] = Registry(
    "train.optimizer",
    {
        "sgd": Entry("train.backends.optimizers:SGD", "with `momentum`, and L2 regularization by `weight_decay`"),
        "adam": Entry("train.backends.optimizers:ADAM", "Adam"),
        "adamw": Entry("train.backends.optimizers:ADAMW", "Adam with decoupled `weight_decay`"),
    },
    options_prefix="optimizer_",
    point=ExtensionPoint("how gradients change weights", "train.optimizers:Optimizer"),
)

_FIRST_DEFAULTS = {"momentum": 0.9, "weight_decay": 1e-4}
"""Defaults of the first recipe, for all optimizers."""


def not_in(name: str, backend: str) -> UsageError:
    """Return the error that an optimizer does not exist in a framework."""
    return UsageError(
        f"train.optimizer = {name!r} with the backend {backend!r}", "it is not there", "name another optimizer"
    )


def optimizer_name(config: TrainConfig) -> str:
    """Return the named optimizer of the config; a compiled model may use its own instead."""
    return "adam" if config.optimizer == "auto" else config.optimizer


def momentum_of(config: TrainConfig) -> float:
    """`train.momentum`, or the optimizer's default."""
    return _values(config)["momentum"]


def weight_decay_of(config: TrainConfig) -> float:
    """`train.weight_decay`, or the optimizer's default."""
    # In the first recipe only AdamW used it.
    is_unused = config.is_first_recipe and optimizer_name(config) == "sgd"
    return 0.0 if is_unused else _values(config)["weight_decay"]


def recorded_of_optimizer(config: TrainConfig) -> dict[str, float]:
    """Return the optimizer settings that identify a training; the recipe only if it makes a difference.

    What is not used is recorded as in the first recipe, so that trainings of that time keep their names.
    """
    makes_difference = bool(_defaults(config)) and not config.is_first_recipe
    return _values(config) | ({"recipe_version": config.recipe_version} if makes_difference else {})


def _values(config: TrainConfig) -> dict[str, float]:
    defaults = _FIRST_DEFAULTS if config.is_first_recipe else _FIRST_DEFAULTS | _defaults(config)
    given = {name: getattr(config, name) for name in defaults}
    return {name: defaults[name] if value == "auto" else float(value) for name, value in given.items()}


def _defaults(config: TrainConfig) -> dict[str, float]:
    """Those of the settings that the optimizer uses."""
    optimizer = OPTIMIZERS[optimizer_name(config)]
    defaults = {name: getattr(optimizer, name) for name in _FIRST_DEFAULTS}
    return {name: value for name, value in defaults.items() if value is not None}


def check_optimizer(config: TrainConfig) -> None:
    """Raises UsageError for a setting that the optimizer does not use."""
    # In the first recipe such a setting was ignored.
    used = _FIRST_DEFAULTS if config.is_first_recipe else _defaults(config)
    for name in _FIRST_DEFAULTS:
        if getattr(config, name) != "auto" and name not in used:
            able = [repr(each) for each in OPTIMIZERS if getattr(OPTIMIZERS[each], name) is not None]
            raise UsageError(
                f"train.{name} = {getattr(config, name)} with train.optimizer = {config.optimizer!r}",
                "which does not use it",
                f"remove train.{name}, or set train.optimizer to {' or '.join(able)}",
            )
