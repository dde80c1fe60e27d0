"""`SampleDropout` for a Keras model, on TensorFlow or on Keras's torch backend, as a user's model imports it."""

from __future__ import annotations

from typing import Any

import keras

from train.layers.sample_bits import ELEMENTS_OF_WORD, DropRate, keys_here, low_bits, words_of


@keras.saving.register_keras_serializable("shardmill")
class SampleDropout(keras.layers.Layer):
    """Dropout that does not depend on ranks: the first axis is the batch, and each sample has a mask of its own.

    The mask of a sample is a function of (`train.seed`, epoch, sample id, place of the layer among those of the
    model): `train/layers/sample_bits.py` has the formula and its source. Element e of a sample, the last axis running
    fastest, is dropped by the sixteen bits e of its words. What is kept is divided by the share that is kept, so
    `rate`, from 0 to less than 1, is that of `keras.layers.Dropout`. Without `training` it is the identity.

    A layer that is called twice in a forward pass drops the same elements twice; give each place its own.
    `call` raises UsageError in training outside a training step of shardmill.
    """

    place: int | None = None
    """Among the model's, which training tells it."""

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(**options)
        self.rate = rate
        self.supports_masking = True
        self._drops = DropRate(rate)
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training or self._drops.is_zero:
            return inputs
        keys_N, num_elements = keys_here(self.place, inputs.shape)
        ops: Any = keras.ops
        counters_W = ops.arange(-(-num_elements // ELEMENTS_OF_WORD), dtype="int64")
        words_NW = words_of(keys_N, self.place or 0, counters_W, _shift_right)
        bits_NE = ops.view(words_NW, "int16")[:, :num_elements]
        is_kept = ops.reshape(ops.greater_equal(bits_NE, self._drops.smallest_kept), ops.shape(inputs))
        return ops.where(is_kept, inputs * self._drops.scale, 0.0)

    def compute_output_shape(self, input_shape: Any) -> Any:
        return input_shape

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "rate": self.rate}


def _shift_right(words: Any, num_bits: int) -> Any:
    return keras.ops.bitwise_and(keras.ops.right_shift(words, num_bits), low_bits(num_bits))
