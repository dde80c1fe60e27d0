"""From `train.model` to a checked model whose variables exist, with its loss and the scale of its inputs.

Shape legend: N batch, H height, W width, C channels, K classes. Models take float32 images_NHWC, standardized
unless `train.standardize` is false.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from typing import Any

from shardmill.dataset.manifest import Manifest
from shardmill.errors import UsageError
from train.models import MODELS
from train.models.losses import PerSampleLoss, are_outputs_logits, choose_loss
from train.models.user import USER_PACKAGE, call_factory, source_sha256
from train.settings import TrainSettings
from train.values import ModelIdentity

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
    """Of what was built, before any step has changed it: `config_sha256`."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """What is subtracted from the pixels of each channel, and what they are then divided by."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def build_model(config: TrainSettings, image_shape_HWC: tuple[int, int, int], num_classes: int) -> BuiltModel:
    """Build the model that `train.model` names, with fresh weights from Keras's global seed.

    Raises UsageError for an unknown name, a factory that does not import or fails, or an output other than (N, K).
    """
    import keras

    if num_classes < 2:
        raise UsageError(f"the dataset has {num_classes} class(es)", "expected at least 2 to train a classifier")
    former_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(DTYPE_POLICIES[config.mixed_precision])
    try:
        if MODELS.is_own(config.model):
            model = call_factory(config.model, image_shape_HWC, num_classes)
        else:
            model = MODELS[config.model](image_shape_HWC, num_classes)
        outputs_are_logits = are_outputs_logits(config, model)
        loss = choose_loss(config, model, outputs_are_logits, num_classes)
        _check_outputs(config.model, model, loss, image_shape_HWC, num_classes)
    finally:
        # The policy is Keras's global; nothing built later in this process should inherit it.
        keras.config.set_dtype_policy(former_policy)
    optimizer = model.optimizer if getattr(model, "compiled", False) else None
    return BuiltModel(model, outputs_are_logits, loss, optimizer, config_sha256(model))


def input_scale(config: TrainSettings, manifest: Manifest) -> InputScale:
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


def config_sha256(model: Any) -> str:
    """Over the configuration and the variables' shapes of a built Keras model, compiled optimizer and loss included.

    Names that Keras counts up in each process do not matter, nor dtypes: an export computes in float32 what was trained
    in another precision. A model that cannot tell its configuration counts by its layers and variables.
    """
    try:
        with warnings.catch_warnings():
            # Of a lambda that it cannot be loaded again; nobody loads this.
            warnings.simplefilter("ignore")
            config = json.loads(model.to_json())
    except Exception:  # a user's get_config may raise anything, and subclassed models need not have one
        config = [type(layer).__name__ for layer in model.layers]
    variables = [[list(variable.shape), bool(variable.trainable)] for variable in model.variables]
    # Whether a user's module needed a name of its own depends on what else is installed.
    text = json.dumps([_canonical(config), variables], sort_keys=True).replace(f"{USER_PACKAGE}.", "")
    return hashlib.sha256(text.encode()).hexdigest()


def identify_model(name: str, built: BuiltModel, source_of_driver: str) -> ModelIdentity:
    """What this rank has built. Raises UsageError if its source is not the one that the driver found."""
    source = source_sha256(name)
    if source != source_of_driver:
        raise UsageError(
            f"train.model = {name!r}: the source here has SHA-256 {source}",
            f"expected {source_of_driver}, which the driver found",
            "give all machines the same file (--py-files), and do not change it while a training starts",
        )
    return ModelIdentity(source, built.config_sha256)


def check_same_model(then: ModelIdentity, now: ModelIdentity, name: str, where: str) -> None:
    """Raises UsageError if `where` holds the weights of another model than `train.model` is now."""
    differences = then.differences(now)
    if differences:
        raise UsageError(
            f"{where} holds the weights of another model than train.model = {name!r} builds now: "
            f"{'; '.join(differences)}",
            "expected the factory, its settings and Keras as they were then",
            "restore them, or train again (`shardmill train --fresh`)",
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


def _canonical(config: Any) -> Any:
    """The configuration with every layer's name replaced by its place in the order of appearance, without dtypes."""
    places: dict[str, str] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                places.setdefault(value["name"], f"#{len(places)}")
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(inner) for key, inner in value.items() if key != "dtype"}
        if isinstance(value, list):
            return [rename(inner) for inner in value]
        return places.get(value, value) if isinstance(value, str) else value

    collect(config)
    return rename(config)
