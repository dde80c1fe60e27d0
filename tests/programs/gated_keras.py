"""As gated_torch.py, of Keras."""

import os
import time
from pathlib import Path

import keras
import tensorflow as tf

_STEPS = 11


class Gate(keras.layers.Layer):
    num_begun = 0

    def call(self, images, training=None):
        with tf.control_dependencies([tf.py_function(self._wait, [], [])] if training else []):
            return tf.identity(images)

    def _wait(self):
        self.num_begun += 1
        while "TEST_GATE" in os.environ and self.num_begun > _STEPS and not Path(os.environ["TEST_GATE"]).exists():
            time.sleep(0.05)


def net(image_shape, num_classes):
    layers = keras.layers
    hidden, out = layers.Dense(16, activation="gelu"), layers.Dense(num_classes)
    return keras.Sequential([keras.Input(image_shape), Gate(), layers.Flatten(), hidden, out])
