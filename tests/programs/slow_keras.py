"""As slow_torch.py, of Keras."""

import time

import keras
import tensorflow as tf


class Slow(keras.layers.Layer):
    def call(self, images):
        with tf.control_dependencies([tf.py_function(lambda: time.sleep(0.3), [], [])]):
            return tf.identity(images)


def net(image_shape, num_classes):
    layers = keras.layers
    hidden, out = layers.Dense(16, activation="gelu"), layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), Slow(), layers.Flatten(), hidden, out])
