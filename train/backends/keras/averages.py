"""Moving averages of a Keras model's weights (`train.ema_decay`), updated behind each step in one compiled function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from train.backends.ema import ema_decay_after
from train.backends.keras.runtime import traced


class WeightAverages:
    """One average for each weight, in the weight's type. Before the first update it is the weight itself."""

    def __init__(self, weights: Sequence[Any], limit: float) -> None:
        import keras

        self.weights = tuple(weights)
        self.averages = tuple(
            keras.Variable(np.asarray(weight), dtype=weight.dtype, trainable=False, name="average")
            for weight in self.weights
        )
        self.num_updates = keras.Variable(0, dtype="int64", trainable=False, name="num_averaged")
        self._limit = limit
        self._compiled_move = traced(self._move)

    def update(self) -> None:
        """After an update of the weights."""
        import tensorflow as tf

        num_updates = int(np.asarray(self.num_updates))
        self._compiled_move(tf.constant(1 - ema_decay_after(num_updates, self._limit), tf.float32))
        self.num_updates.assign(num_updates + 1)

    def begin(self) -> None:
        """Forget all: other weights were given."""
        self.num_updates.assign(0)
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.assign(np.asarray(weight))

    def give(self) -> None:
        """Let the weights be their averages."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            weight.assign(np.asarray(average))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the model computes with the averages; behind it with its weights."""
        kept = [np.array(weight) for weight in self.weights]
        self.give()
        try:
            yield
        finally:
            for weight, value in zip(self.weights, kept, strict=True):
                weight.assign(value)

    def _move(self, share: Any) -> None:
        import tensorflow as tf

        for average, weight in zip(self.averages, self.weights, strict=True):
            # In this form a weight that is frozen keeps its bits.
            old = tf.convert_to_tensor(average.value)
            average.assign(old + tf.cast(share, old.dtype) * (tf.convert_to_tensor(weight.value) - old))
