"""A Keras model of which a process is mostly in the middle of a step."""

from __future__ import annotations

import keras

from tests.train.models_under_test import linear


class Labour(keras.layers.Layer):
    """Computes for some hundred milliseconds what hardly counts."""

    SIZE, NUM_PRODUCTS = 1500, 4

    def call(self, inputs):
        product = keras.ops.ones((self.SIZE, self.SIZE)) * keras.ops.mean(inputs)
        for _ in range(self.NUM_PRODUCTS):
            product = keras.ops.tanh(keras.ops.matmul(product, product))
        # Not a zero, of which TensorFlow would leave the rest out.
        return inputs + 1e-9 * keras.ops.mean(product)


def laborious(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), Labour(), *linear(image_shape, num_classes).layers])
