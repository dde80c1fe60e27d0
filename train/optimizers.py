"""The optimizers that can be named; a new one is a function and an entry here.

Each entry is called with the section `train` and returns a Keras optimizer at its base learning rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from train.config import TrainConfig

_NEEDED = ("tensorflow", "keras")

OPTIMIZERS: Registry[Callable[[TrainConfig], Any]] = Registry(
    "train.optimizer",
    {
        "sgd": Entry("train.backends.keras.optimizers:sgd", "with `momentum`", extra="tensorflow", packages=_NEEDED),
        "adam": Entry("train.backends.keras.optimizers:adam", "Adam", extra="tensorflow", packages=_NEEDED),
        "adamw": Entry(
            "train.backends.keras.optimizers:adamw",
            "Adam with decoupled `weight_decay`",
            extra="tensorflow",
            packages=_NEEDED,
        ),
    },
)
