"""The loss of a Keras model for each kind of label, its predictions, and what counts as right.

Shape legend: N batch, K outputs. Labels: class numbers (N,), 0 or 1 for each class (N, K), numbers (N,) or (N, K).
Where rows are mixed, classes are shares (N, K).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shardmill.errors import UsageError
from shardmill.values import LabelKind
from train.config import TrainConfig
from train.labels import LOSSES, LabelSpec

PerSample = Callable[[Any, Any], Any]
"""(labels, outputs_NK float32) -> float32 (N,)."""

# As in Keras: keeps the logarithm of a probability of 0 finite, and bounds its gradient in float32. Figures that are
# reported, not minimised, go further down (train/metrics/evaluate.py).
SMALLEST_PROBABILITY = 1e-7


def choose_loss(config: TrainConfig, model: Any, outputs_are_logits: bool, labels: LabelSpec) -> PerSample:
    """The compiled model's own loss under `train.loss = "auto"`, else the one that fits the labels."""
    own = compiled_loss(model) if config.loss == "auto" else None
    if own is None:
        if labels.are_numbers:
            return _squared_error
        of_kind = _softmax_loss if labels.kind == "class" else _sigmoid_loss
        return of_kind(outputs_are_logits, labels.num_outputs, config.label_smoothing)
    if config.label_smoothing:
        raise UsageError(
            f"train.label_smoothing = {config.label_smoothing} with the loss of a compiled model",
            "expected 0 there",
            f'set train.loss = "{LOSSES[labels.kind]}", or set label_smoothing in your own loss',
        )
    return _own_loss(own, labels, mixes=config.augment.mixes)


def weighted_loss(loss: PerSample, class_weights: tuple[float, ...]) -> PerSample:
    """`loss` times the weight of each sample's class; `loss` itself if there are none."""
    import tensorflow as tf

    if not class_weights:
        return loss

    def weighted(labels: Any, outputs_NK: Any) -> Any:
        # Of a mixed row the mean of its classes' weights.
        weights_K = tf.constant(class_weights, tf.float32)
        is_mixed = labels.shape.rank == 2
        weights_N = tf.linalg.matvec(labels, weights_K) if is_mixed else tf.gather(weights_K, labels)
        return loss(labels, outputs_NK) * weights_N

    return weighted


def compiled_loss(model: Any) -> Any | None:
    """The one loss (a function or Loss object) that the model was compiled with, or None.

    Raises UsageError for several losses: a model has one output here.
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
            f"the model was compiled with {len(loss)} losses", "expected one", "or set train.loss to a name"
        )
    return keras.losses.get(loss)


def compiled_for_logits(config: TrainConfig, model: Any) -> bool | None:
    """Return the output form that the compiled loss expects; None if no loss is compiled or the form is
    not declared.
    """
    import keras

    own = compiled_loss(model) if config.loss == "auto" else None
    if own is None:
        return None
    if isinstance(own, keras.losses.Loss):
        from_logits = own.get_config().get("from_logits")
    else:
        parameter = inspect.signature(own).parameters.get("from_logits")
        from_logits = parameter.default if parameter is not None else None
    return from_logits if isinstance(from_logits, bool) else None


def right_of(kind: LabelKind, outputs_are_logits: bool) -> PerSample:
    """Whether the class of each sample is right; of several classes the share that is; 0 for numbers.

    The class of a mixed row is that of the larger share.
    """
    import tensorflow as tf

    def class_is_right(labels: Any, outputs_NK: Any) -> Any:
        classes_N = tf.argmax(labels, axis=1) if labels.shape.rank == 2 else labels
        return tf.cast(tf.argmax(outputs_NK, axis=1) == classes_N, tf.float32)

    def share_is_right(labels_NK: Any, outputs_NK: Any) -> Any:
        is_chosen_NK = outputs_NK >= (0.0 if outputs_are_logits else 0.5)
        return tf.reduce_mean(tf.cast(is_chosen_NK == (labels_NK > 0.5), tf.float32), axis=1)

    def none_is_right(_labels_N: Any, outputs_NK: Any) -> Any:
        return tf.zeros(tf.shape(outputs_NK)[:1], tf.float32)

    return {"class": class_is_right, "multi_label": share_is_right}.get(kind, none_is_right)


def predictions_of(kind: LabelKind, outputs_are_logits: bool, outputs_NK: Any) -> Any:
    """float32 outputs -> what serving gives: probabilities, or the numbers."""
    import tensorflow as tf

    if not outputs_are_logits:
        return outputs_NK
    return tf.nn.softmax(outputs_NK) if kind == "class" else tf.sigmoid(outputs_NK)


def _softmax_loss(outputs_are_logits: bool, num_classes: int, label_smoothing: float) -> PerSample:
    import tensorflow as tf

    def losses_of(labels_N: Any, outputs_NK: Any) -> Any:
        if outputs_are_logits:
            log_probabilities_NK = tf.nn.log_softmax(outputs_NK)
        else:
            log_probabilities_NK = tf.math.log(tf.clip_by_value(outputs_NK, SMALLEST_PROBABILITY, 1.0))
        targets_NK = _shares(labels_N, num_classes) * (1.0 - label_smoothing) + label_smoothing / num_classes
        return -tf.reduce_sum(targets_NK * log_probabilities_NK, axis=1)

    return losses_of


def _sigmoid_loss(outputs_are_logits: bool, _num_classes: int, label_smoothing: float) -> PerSample:
    """Binary cross-entropy, the mean over the classes."""
    import tensorflow as tf

    def losses_of(labels_NK: Any, outputs_NK: Any) -> Any:
        targets_NK = tf.cast(labels_NK, tf.float32) * (1.0 - label_smoothing) + label_smoothing / 2
        if outputs_are_logits:
            losses_NK = tf.nn.sigmoid_cross_entropy_with_logits(targets_NK, outputs_NK)
        else:
            clipped_NK = tf.clip_by_value(outputs_NK, SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY)
            losses_NK = -targets_NK * tf.math.log(clipped_NK) - (1.0 - targets_NK) * tf.math.log(1.0 - clipped_NK)
        return tf.reduce_mean(losses_NK, axis=1)

    return losses_of


def _squared_error(labels: Any, outputs_NK: Any) -> Any:
    """The mean over the numbers of a label."""
    import tensorflow as tf

    targets_NK = tf.reshape(tf.cast(labels, tf.float32), tf.shape(outputs_NK))
    return tf.reduce_mean(tf.square(outputs_NK - targets_NK), axis=1)


def _shares(labels: Any, num_classes: int) -> Any:
    import tensorflow as tf

    return labels if labels.shape.rank == 2 else tf.one_hot(labels, num_classes)


def _own_loss(own: Any, labels: LabelSpec, *, mixes: bool) -> PerSample:
    """`own` unreduced. Keras's dense losses get one-hot labels; sparse ones and a user's own functions get integers.

    Labels that are not classes are given in the shape of the outputs.
    """
    import keras
    import tensorflow as tf

    name = getattr(own, "__name__", type(own).__name__)
    module = getattr(own, "__module__", type(own).__module__) or ""
    is_class = labels.kind == "class"
    wants_one_hot = is_class and module.split(".")[0] == "keras" and "sparse" not in name.lower()
    if mixes and is_class and not wants_one_hot:
        raise UsageError(
            f"train.augment mixes rows, and the model's own loss {name} takes class numbers",
            "expected a loss that takes shares of classes",
            'compile the model with keras.losses.CategoricalCrossentropy, or set train.loss = "softmax"',
        )
    function = own.call if isinstance(own, keras.losses.Loss) else own

    def losses_of(labels_N: Any, outputs_NK: Any) -> Any:
        targets = _shares(labels_N, labels.num_outputs) if wants_one_hot else labels_N
        if not is_class:
            targets = tf.reshape(tf.cast(labels_N, tf.float32), tf.shape(outputs_NK))
        losses = tf.cast(function(targets, outputs_NK), tf.float32)
        if losses.shape.rank == 0:
            raise UsageError(
                f"the model's own loss {name} returns one number for a whole batch",
                "expected one loss per sample, of shape (N,)",
                f'let the training loop compute the mean, or set train.loss = "{LOSSES[labels.kind]}"',
            )
        return tf.reduce_mean(tf.reshape(losses, [tf.shape(losses)[0], -1]), axis=1)

    return losses_of
