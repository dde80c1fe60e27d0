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

_SETTINGS = ("momentum", "weight_decay")


def not_in(name: str, backend: str) -> UsageError:
    """Return the error that an optimizer does not exist in a framework."""
    return UsageError(
        f"train.optimizer = {name!r} with the backend {backend!r}", "it is not there", "name another optimizer"
    )


def optimizer_name(config: TrainConfig) -> str:
    """Return the named optimizer of the config; a compiled model may use its own instead."""
    return "adam" if config.optimizer == "auto" else config.optimizer


def momentum_of(config: TrainConfig) -> float:
    """`train.momentum`, or the optimizer's default; 0 for an optimizer that declares that it uses none."""
    return values_of_optimizer(config).get("momentum", 0.0)


def weight_decay_of(config: TrainConfig) -> float:
    """`train.weight_decay`, or the optimizer's default; 0 for an optimizer that declares that it uses none."""
    return values_of_optimizer(config).get("weight_decay", 0.0)


def values_of_optimizer(config: TrainConfig) -> dict[str, float]:
    """The values of those of the settings that the optimizer uses, with `auto` resolved."""
    optimizer = OPTIMIZERS[optimizer_name(config)]
    defaults = {name: value for name in _SETTINGS if (value := getattr(optimizer, name)) is not None}
    given = {name: getattr(config, name) for name in defaults}
    return {name: defaults[name] if value == "auto" else float(value) for name, value in given.items()}


def check_optimizer(config: TrainConfig) -> None:
    """Raises UsageError for a setting that the optimizer does not use."""
    used = values_of_optimizer(config)
    for name in _SETTINGS:
        if getattr(config, name) != "auto" and name not in used:
            able = [repr(each) for each in OPTIMIZERS if getattr(OPTIMIZERS[each], name) is not None]
            raise UsageError(
                f"train.{name} = {getattr(config, name)} with train.optimizer = {config.optimizer!r}",
                "which does not use it",
                f"remove train.{name}, or set train.optimizer to {' or '.join(able)}",
            )
