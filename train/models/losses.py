"""The loss of every single sample, so that weights, padding and world size can be dealt with by exact sums.

Shape legend: N batch, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardmill.errors import UsageError
from train.settings import TrainSettings

PerSampleLoss = Callable[[Any, Any], Any]
"""(labels_N int64, outputs_NK float32) -> losses_N float32."""

# As in Keras: keeps the logarithm of a probability of 0 finite, and bounds its gradient in float32. Figures that are
# told, not minimised, go further down (train/evaluate.py).
SMALLEST_PROBABILITY = 1e-7


def choose_loss(config: TrainSettings, model: Any, outputs_are_logits: bool, num_classes: int) -> PerSampleLoss:
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


def are_outputs_logits(config: TrainSettings, model: Any) -> bool:
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
