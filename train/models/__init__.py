"""The models that can be trained by name; a new one is a module and an entry here, and the shared tests run over it.

Each entry is called as `factory((H, W, C), num_classes)` and returns a Keras 3 model that takes float32 images_NHWC, or
a PyTorch module that takes images_NCHW; standardized unless `train.standardize` is false.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill.registry import Entry, Registry

MODELS: Registry[Callable[[tuple[int, int, int], int], Any]] = Registry(
    "train.model",
    {
        "small_cnn": Entry(
            "train.models.small_cnn:small_cnn",
            "a few convolutions, for small images and CPUs",
            extra="tensorflow",
            packages=("keras",),
        ),
        "resnet50": Entry(
            "train.models.resnet50:resnet50",
            "ResNet-50, for images of at least 32 x 32",
            extra="tensorflow",
            packages=("keras",),
        ),
    },
    takes_own=True,
)
