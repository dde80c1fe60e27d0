"""From `train.model` to a checked model whose variables exist, with its loss.

Shape legend: N batch, H height, W width, C channels, K classes. Models take float32 images_NHWC, standardized
unless `train.standardize` is false.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.backends.keras.runtime import config_sha256
from train.config import TrainConfig
from train.models import MODELS
from train.models.user import call_factory

PerSampleLoss = Callable[[Any, Any], Any]
"""(labels_N int64, outputs_NK float32) -> losses_N float32."""

# As in Keras: keeps the logarithm of a probability of 0 finite, and bounds its gradient in float32. Figures that are
# reported, not minimised, go further down (train/evaluate.py).
SMALLEST_PROBABILITY = 1e-7
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


def build_model(config: TrainConfig, image_shape_HWC: tuple[int, int, int], num_classes: int) -> BuiltModel:
    """Build the model that `train.model` names, with fresh weights from Keras's global seed.

    Raises UsageError for an unknown name, a factory that does not import or fails, or an output other than (N, K).
    """
    import keras

    if num_classes < 2:
        raise UsageError(
            f"the dataset has {num_classes} class(es)",
            "expected at least 2 to train a classifier",
            "add images of another",
        )
    former_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(DTYPE_POLICIES[config.mixed_precision])
    try:
        if MODELS.is_own(config.model):
            model = call_factory(config.model, image_shape_HWC, num_classes)
        else:
            model = MODELS[config.model](image_shape_HWC, num_classes)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"train.model = {config.model!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
                "expected a Keras 3 model (keras.Model, keras.Sequential or a subclass)",
                'return the model itself; for a PyTorch module set train.backend = "torch"',
            )
        check_pixels(config, model)
        outputs_are_logits = are_outputs_logits(config, model)
        loss = choose_loss(config, model, outputs_are_logits, num_classes)
        _check_outputs(config.model, model, loss, image_shape_HWC, num_classes)
    finally:
        # The policy is Keras's global; nothing built later in this process should inherit it.
        keras.config.set_dtype_policy(former_policy)
    optimizer = model.optimizer if getattr(model, "compiled", False) else None
    return BuiltModel(model, outputs_are_logits, loss, optimizer, config_sha256(model))


def choose_loss(config: TrainConfig, model: Any, outputs_are_logits: bool, num_classes: int) -> PerSampleLoss:
    """The compiled model's own loss under `train.loss = "auto"`, else softmax cross-entropy."""
    own = compiled_loss(model) if config.loss == "auto" else None
    if own is None:
        return _softmax_loss(outputs_are_logits, num_classes, config.label_smoothing)
    if config.label_smoothing:
        raise UsageError(
            f"train.label_smoothing = {config.label_smoothing} with the loss of a compiled model",
            "expected 0 there",
            'set train.loss = "softmax", or give your own loss its label_smoothing',
        )
    return _own_loss(own, num_classes)


def check_pixels(config: TrainConfig, model: Any) -> None:
    """Raises UsageError if a model of a library scales pixels by itself, and would get standardized ones."""
    import keras

    scales = any(isinstance(layer, keras.layers.Rescaling) for layer in model.layers)
    if scales and config.standardize and MODELS.is_of_library(config.model):
        raise UsageError(
            f"train.model = {config.model!r} scales pixels by itself, and train.standardize is true",
            "expected pixels from 0 to 255 there",
            "set train.standardize = false",
        )


def compiled_loss(model: Any) -> Any | None:
    """The one loss (a function or Loss object) that the model was compiled with, or None.

    Raises UsageError for several losses: a classifier has one output here.
    """
    import keras

    if not getattr(model, "compiled", False) or getattr(model, "loss", None) is None:
        return None
    loss = model.loss
    if isinstance(loss, dict) and len(loss) == 1:
        loss = next(iter(loss.values()))
    elif isinstance(loss, list | tuple) and len(loss) == 1:
        loss = loss[0]
    if isinstance(loss, dict | list | tuple):
        raise UsageError(
            f"the model was compiled with {len(loss)} losses", "expected one", 'or set train.loss = "softmax"'
        )
    return keras.losses.get(loss)


def are_outputs_logits(config: TrainConfig, model: Any) -> bool:
    """What the config says; under `auto` what the compiled loss says, else what the last layer's activation says."""
    import keras

    if config.model_outputs != "auto":
        return config.model_outputs == "logits"
    own = compiled_loss(model)
    if isinstance(own, keras.losses.Loss):
        from_logits = own.get_config().get("from_logits")
        if isinstance(from_logits, bool):
            return from_logits
    last_layer = model.layers[-1] if model.layers else None
    if isinstance(last_layer, keras.layers.Softmax):
        return False
    return getattr(last_layer, "activation", None) is not keras.activations.softmax


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
        raise UsageError(
            f"train.model = {name!r} has no trainable variables", "expected at least one", "unfreeze a layer"
        )
    loss(tf.zeros(2, tf.int64), tf.cast(outputs, tf.float32))


def _softmax_loss(outputs_are_logits: bool, num_classes: int, label_smoothing: float) -> PerSampleLoss:
    import tensorflow as tf

    def losses_of(labels_N: Any, outputs_NK: Any) -> Any:
        if outputs_are_logits:
            log_probabilities_NK = tf.nn.log_softmax(outputs_NK)
        else:
            log_probabilities_NK = tf.math.log(tf.clip_by_value(outputs_NK, SMALLEST_PROBABILITY, 1.0))
        targets_NK = tf.one_hot(labels_N, num_classes) * (1.0 - label_smoothing) + label_smoothing / num_classes
        return -tf.reduce_sum(targets_NK * log_probabilities_NK, axis=1)

    return losses_of


def _own_loss(own: Any, num_classes: int) -> PerSampleLoss:
    """`own` unreduced. Keras's dense losses get one-hot labels; sparse ones and a user's own functions get integers."""
    import keras
    import tensorflow as tf

    name = getattr(own, "__name__", type(own).__name__)
    module = getattr(own, "__module__", type(own).__module__) or ""
    wants_one_hot = module.split(".")[0] == "keras" and "sparse" not in name.lower()
    function = own.call if isinstance(own, keras.losses.Loss) else own

    def losses_of(labels_N: Any, outputs_NK: Any) -> Any:
        targets = tf.one_hot(labels_N, num_classes) if wants_one_hot else labels_N
        losses = tf.cast(function(targets, outputs_NK), tf.float32)
        if losses.shape.rank == 0:
            raise UsageError(
                f"the model's own loss {name} gives one number for a whole batch",
                "expected one loss per sample, of shape (N,)",
                'leave the mean to the training loop, or set train.loss = "softmax"',
            )
        return tf.reduce_mean(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)

    return losses_of
