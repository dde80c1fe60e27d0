"""The models that can be trained by name, and how a name or a user's factory becomes a checked model.

Shape legend: N batch, H height, W width, C channels, K classes. Models take float32 images_NHWC, standardized
unless `train.standardize` is false.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardmill.dataset.manifest import Manifest
from shardmill.errors import UsageError
from train.config import TrainConfig
from train.models.identity import config_sha256
from train.models.losses import PerSampleLoss, are_outputs_logits, choose_loss
from train.models.resnet50 import resnet50
from train.models.small_cnn import small_cnn
from train.models.user import call_factory

MODELS: dict[str, Callable[[tuple[int, int, int], int], Any]] = {"small_cnn": small_cnn, "resnet50": resnet50}

# Keras's names for our words.
DTYPE_POLICIES = {"off": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model whose variables exist and whose output fits the dataset's classes."""

    model: Any
    """A Keras 3 model: standardized float32 images_NHWC -> outputs_NK."""
    outputs_are_logits: bool
    per_sample_loss: PerSampleLoss
    compiled_optimizer: Any | None
    """The optimizer that a user's factory compiled the model with."""
    config_sha256: str
    """Of what was built (train/models/identity.py), before any step has changed it."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """What is subtracted from the pixels of each channel, and what they are then divided by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def build_model(config: TrainConfig, image_shape_HWC: tuple[int, int, int], num_classes: int) -> BuiltModel:
    """Build the model that `train.model` names, with fresh weights from Keras's global seed.

    Raises UsageError for an unknown name, a factory that does not import or fails, or an output other than (N, K).
    """
    import keras

    if num_classes < 2:
        raise UsageError(f"the dataset has {num_classes} class(es)", "expected at least 2 to train a classifier")
    former_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(DTYPE_POLICIES[config.mixed_precision])
    try:
        if ":" in config.model:
            model = call_factory(config.model, image_shape_HWC, num_classes)
        else:
            model = named_factory(config.model)(image_shape_HWC, num_classes)
        outputs_are_logits = are_outputs_logits(config, model)
        loss = choose_loss(config, model, outputs_are_logits, num_classes)
        _check_outputs(config.model, model, loss, image_shape_HWC, num_classes)
    finally:
        # The policy is Keras's global; nothing built later in this process should inherit it.
        keras.config.set_dtype_policy(former_policy)
    optimizer = model.optimizer if getattr(model, "compiled", False) else None
    return BuiltModel(model, outputs_are_logits, loss, optimizer, config_sha256(model))


def input_scale(config: TrainConfig, manifest: Manifest) -> InputScale:
    """How a model's inputs arrive: standardized over the train split, or untouched without `train.standardize`."""
    if config.standardize:
        return InputScale(manifest.channel_mean, manifest.channel_std)
    num_channels = len(manifest.channel_mean)
    return InputScale((0.0,) * num_channels, (1.0,) * num_channels)


def standardize(images_NHWC: Any, channel_mean: tuple[float, ...], channel_std: tuple[float, ...]) -> Any:
    """uint8 images on the 0..255 scale -> float32 with mean 0 and deviation 1 per channel over the train split."""
    import tensorflow as tf

    return (tf.cast(images_NHWC, tf.float32) - tf.constant(channel_mean, tf.float32)) / tf.constant(
        channel_std, tf.float32
    )


def named_factory(name: str) -> Callable[[tuple[int, int, int], int], Any]:
    """The built-in model of that name. Raises UsageError with the nearest one if there is none."""
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else "your own model is given as package.module:function"
    raise UsageError(
        f"train.model = {name!r}", f"expected one of {', '.join(MODELS)}, or package.module:function", hint
    )


def _check_outputs(
    name: str, model: Any, loss: PerSampleLoss, image_shape_HWC: tuple[int, int, int], num_classes: int
) -> None:
    """Call the model on two black images: creates the variables of subclassed models and shows the output's shape."""
    import tensorflow as tf

    images_NHWC = tf.zeros((2, *image_shape_HWC), tf.float32)
    try:
        outputs = model(images_NHWC, training=False)
    except (Exception, SystemExit) as error:
        # A user's own layers may raise anything.
        raise UsageError(
            f"train.model = {name!r}: calling the model failed: {type(error).__name__}: {error}",
            f"expected it to take float32 images of shape (N, {', '.join(map(str, image_shape_HWC))})",
        ) from error
    shape = tuple(getattr(outputs, "shape", ()))
    if shape != (2, num_classes):
        given = (
            f"{shape[1]} outputs" if len(shape) == 2 and shape[0] == 2 else f"an output of shape {shape} for 2 images"
        )
        raise UsageError(
            f"train.model = {name!r} gives {given}",
            f"expected {num_classes} outputs: the dataset has {num_classes} classes",
            "use the num_classes that the factory is called with in the last layer",
        )
    if not model.trainable_variables:
        raise UsageError(f"train.model = {name!r} has no trainable variables", "expected at least one")
    loss(tf.zeros(2, tf.int64), tf.cast(outputs, tf.float32))
