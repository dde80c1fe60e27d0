"""The optimizers that can be named; a new one is an `Optimizer` and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Optimizer:
    """How gradients change weights, in each framework that knows it; at the base learning rate of section `train`."""

    keras: Callable[[TrainConfig], Any] | None = None
    """-> a Keras optimizer. It clips by `train.gradient_clip_norm` itself."""
    torch: Callable[[TrainConfig, list[Any]], Any] | None = None
    """(section `train`, weights) -> a `torch.optim.Optimizer`."""


OPTIMIZERS: Registry[Optimizer] = Registry(
    "train.optimizer",
    {
        "sgd": Entry("train.backends.optimizers:SGD", "with `momentum`"),
        "adam": Entry("train.backends.optimizers:ADAM", "Adam"),
        "adamw": Entry("train.backends.optimizers:ADAMW", "Adam with decoupled `weight_decay`"),
    },
)


def not_in(name: str, backend: str) -> UsageError:
    """That an optimizer does not exist in a framework."""
    return UsageError(
        f"train.optimizer = {name!r} with the backend {backend!r}", "it is not there", "name another optimizer"
    )
