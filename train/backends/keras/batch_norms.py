"""Batch norms of a Keras model over the global batch (`train.sync_batch_norm`), while a step is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from train.api import SumInStep
from train.backends.rules import check_rows, checked, replaced

Moments = Callable[[Any, Any, Any], tuple[Any, Any]]
"""(inputs, mask or None, the layer) -> its mean and variance of each channel."""


def limit_momentum(model: Any, largest: float) -> None:
    """Let the moving statistics of a model follow faster, on any of Keras's own backends."""
    import keras

    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = min(layer.momentum, largest)


class KerasBatchNorms:
    """The batch norms of one model, on any of Keras's own backends; `moments` are the backend's."""

    def __init__(self, model: Any, name: str, moments: Moments) -> None:
        import keras

        stock = keras.layers.BatchNormalization
        found = [layer for layer in model._flatten_layers() if isinstance(layer, stock)]
        self._layers = checked(name, found, ("call", "_moments"), stock)
        self._moments = moments

    @contextmanager
    def synchronized(self) -> Iterator[None]:
        """Inside it training takes the moments from elsewhere."""
        with replaced("_moments", [(layer, partial(self._moments_of, layer)) for layer in self._layers]):
            yield

    def _moments_of(self, layer: Any, inputs: Any, mask: Any) -> tuple[Any, Any]:
        return self._moments(inputs, mask, layer)


@dataclass
class TracedStep:
    """Facts about the traced step that batch norms need, on this replica."""

    weights_N: Any
    token: Any
    """Each sum waits for the one before it, forward and backward: in an order of their own two sums may be fused, or
    not, and three ranks' additions come out otherwise."""
    num_sums: int = 0


_step: ContextVar[TracedStep] = ContextVar("train.backends.keras.batch_norms")


@contextmanager
def tracing_step(weights_N: Any) -> Iterator[None]:
    """Around a forward and backward pass. Strategies of tf.distribute trace each replica in a thread of its own."""
    import tensorflow as tf

    before = _step.set(TracedStep(weights_N, tf.constant(0.0, tf.float64)))
    try:
        yield
    finally:
        _step.reset(before)


class TensorFlowMoments:
    """`Moments` inside TensorFlow's graph."""

    def __init__(self, sum_in_step: SumInStep) -> None:
        self._sum_in_step = sum_in_step

    def __call__(self, inputs: Any, mask: Any, layer: Any) -> tuple[Any, Any]:
        import tensorflow as tf

        step = _step.get()
        check_rows(layer.path, inputs.shape[0], step.weights_N.shape[0])
        counts = tf.reshape(step.weights_N > 0, [-1] + [1] * (len(inputs.shape) - 1))
        if mask is not None:
            counts &= tf.cast(mask, tf.bool)[..., tf.newaxis]
        name, step.num_sums = f"batch_norm_{step.num_sums}", step.num_sums + 1

        def over_batch(inputs: Any, token: Any) -> tuple[Any, Any]:
            return self._over_batch(inputs, token, counts, layer._reduction_axes, name)

        mean, variance, step.token = tf.custom_gradient(over_batch)(inputs, step.token)
        return mean, variance

    def _over_batch(self, inputs: Any, token: Any, counts: Any, axes: list[int], name: str) -> tuple[Any, Any]:
        """-> (mean, variance, token), and the function of their gradient."""
        import tensorflow as tf

        def along_channels(values_C: Any) -> Any:
            shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
            return tf.cast(tf.reshape(values_C, shape), inputs.dtype)

        def per_channel(tensor: Any) -> Any:
            return tf.cast(tf.reduce_sum(tensor, axes), tf.float64)

        zero = tf.zeros([], inputs.dtype)
        num_C = per_channel(tf.where(counts, tf.ones_like(inputs), zero))
        sum_C = per_channel(tf.where(counts, inputs, zero))
        mean_here_C = sum_C / tf.maximum(num_C, 1.0)
        deviations = tf.where(counts, inputs - along_channels(mean_here_C), zero)
        # Around this rank's own mean, in the precision of the inputs; only here is it moved to 0, in float64.
        squares_C = per_channel(tf.square(deviations)) + sum_C * mean_here_C
        with tf.control_dependencies([token]):
            sums = self._sum_in_step(tf.stack([num_C, sum_C, squares_C]), name)
        num_C, mean_C, square_C = sums[0], sums[1] / sums[0], sums[2] / sums[0]
        variance_C = tf.maximum(square_C - tf.square(mean_C), 0.0)

        def gradient(of_mean_C: Any, of_variance_C: Any, of_token: Any) -> tuple[Any, Any]:
            with tf.control_dependencies([of_token]):
                mine = tf.cast(tf.stack([of_mean_C, of_variance_C]), tf.float64)
                totals = self._sum_in_step(mine, f"{name}_gradient")
            deviations = inputs - along_channels(mean_C)
            of_inputs = along_channels(totals[0] / num_C) + along_channels(2.0 * totals[1] / num_C) * deviations
            return tf.where(counts, of_inputs, zero), totals[0, 0]

        return (tf.cast(mean_C, inputs.dtype), tf.cast(variance_C, inputs.dtype), sums[0, 0]), gradient


def sum_over_replicas(tensor: Any, name: str) -> Any:
    """`SumInStep` of the strategies of tf.distribute."""
    import tensorflow as tf

    context: Any = tf.distribute.get_replica_context()
    # A tensor that comes from outside has no device, and the collective asks for it.
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor))
