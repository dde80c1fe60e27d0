"""Keras models whose gradients are not finite for some samples."""

from __future__ import annotations

import os

import keras


class Steep(keras.layers.Layer):
    """Adds the root of a weight that is 0 to the answers for images brighter than a limit: at an infinite slope."""

    def build(self, input_shape):
        [_, (_, num_classes)] = input_shape
        self.height = self.add_weight(shape=(num_classes,), initializer="zeros", name="height")

    def call(self, inputs):
        images_NHWC, outputs_NK = inputs
        brightness_N = keras.ops.sum(images_NHWC, axis=(1, 2, 3))
        is_bright_N1 = keras.ops.expand_dims(brightness_N > float(os.environ["SHARDMILL_TEST_BRIGHTEST"]), -1)
        # Of the root of 1 the slope is finite, where it does not count.
        roots_NK = keras.ops.sqrt(keras.ops.where(is_bright_N1, self.height, 1.0))
        return outputs_NK + keras.ops.where(is_bright_N1, roots_NK, 0.0)


def steep(image_shape, num_classes):
    images = keras.Input(image_shape)
    pixels = keras.layers.Flatten()(keras.layers.Rescaling(1 / 255)(images))
    return keras.Model(images, Steep()([images, keras.layers.Dense(num_classes)(pixels)]))


def steep_behind_norm(image_shape, num_classes):
    images = keras.Input(image_shape)
    normed = keras.layers.BatchNormalization()(keras.layers.Rescaling(1 / 255)(images))
    return keras.Model(images, Steep()([images, keras.layers.Dense(num_classes)(keras.layers.Flatten()(normed))]))
