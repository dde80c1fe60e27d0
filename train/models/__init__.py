"""The models that can be trained by name; a new one is a module and an entry here, and the shared tests run over it.

Each entry is called as `factory((H, W, C), num_classes, seed=seed)` and returns a Keras 3 model that takes float32
images_NHWC, or a PyTorch module that takes images_NCHW, standardized unless `train.standardize` is false, with the
values that train/models/first_values.py draws for this seed. Factories of a user and of libraries get no seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill.registry import Entry, ExtensionPoint, Registry

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
        "vit": Entry(
            "train.models.vit:vit",
            "a small vision transformer: four attention blocks over about 64 patches",
            extra="tensorflow",
            packages=("keras",),
        ),
        "vit_tiny": Entry(
            "train.models.vit_torch:vit_tiny",
            "a vision transformer of 5 M weights, DeiT's smallest",
            extra="torch",
            packages=("torch",),
        ),
        "vit_small": Entry(
            "train.models.vit_torch:vit_small",
            "a vision transformer of 22 M weights, DeiT's second",
            extra="torch",
            packages=("torch",),
        ),
        "vit_base": Entry(
            "train.models.vit_torch:vit_base",
            "ViT-Base, 86 M weights",
            extra="torch",
            packages=("torch",),
        ),
        "vit_large": Entry(
            "train.models.vit_torch:vit_large",
            "ViT-Large, 304 M weights",
            extra="torch",
            packages=("torch",),
        ),
        "vit_huge": Entry(
            "train.models.vit_torch:vit_huge",
            "ViT-Huge, 632 M weights",
            extra="torch",
            packages=("torch",),
        ),
    },
    takes_own=True,
    libraries={
        "keras.applications": Entry(
            "train.models.libraries:KERAS_APPLICATIONS",
            "an architecture that Keras ships, with fresh weights",
            extra="tensorflow",
            packages=("keras",),
        ),
        "torchvision.models": Entry(
            "train.models.libraries:TORCHVISION_MODELS",
            "an architecture that torchvision ships, with fresh weights",
            extra="torch",
            packages=("torch", "torchvision"),
        ),
    },
    point=ExtensionPoint("what is trained", "train.models.small_cnn:small_cnn"),
)

MODULES: Registry[Callable[[tuple[int, int, int], int], Any]] = Registry(
    "train.model",
    {
        "small_cnn": Entry(
            "train.models.small_cnn_torch:small_cnn", "the same model in PyTorch", extra="torch", packages=("torch",)
        ),
        "vit": Entry("train.models.vit_torch:vit", "the same model in PyTorch", extra="torch", packages=("torch",)),
    },
)
"""Names of `MODELS` that are Keras models, as `nn.Module`s: built if the strategy needs one (`needs_module`), or
TensorFlow is not installed."""

BUILD_FOR_ANY_IMAGE = frozenset({"small_cnn", "vit", "vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"})
"""Models that build for any image size and number of outputs; other models are built as a check before the ETL."""
