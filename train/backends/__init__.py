"""The frameworks that train; a new one is a folder and an entry here, and the shared tests run over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from train.api import Backend

BACKENDS: Registry[Backend] = Registry(
    "train.backend",
    {
        "keras": Entry(
            "train.backends.keras.backend:KERAS",
            "Keras 3 on TensorFlow",
            extra="tensorflow",
            packages=("tensorflow", "keras"),
        ),
        "torch": Entry("train.backends.torch.backend:TORCH", "PyTorch", extra="torch", packages=("torch",)),
    },
    point=ExtensionPoint("the framework, and all code that imports it", "train.api:Backend"),
)
