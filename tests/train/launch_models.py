"""Users' own models for the tests of launchers and export: some fail while they train, some are hard to save."""

from __future__ import annotations

import os
import signal

import keras
import tensorflow as tf

from train.layers.keras import SampleDropout

# The model is called once when it is built; the steps are numbered from then on.
FAULTY_CALL = 4


class _Tick(keras.layers.Layer):
    """Hands its input on, and calls a Python function each time."""

    def __init__(self, on_call):
        super().__init__()
        self._on_call = on_call
        self._num_calls = 0

    def call(self, inputs):
        with tf.control_dependencies([tf.py_function(self._tick, [], [])]):
            return tf.identity(inputs)

    def _tick(self):
        self._num_calls += 1
        if (
            self._num_calls == FAULTY_CALL
            and int(os.environ.get("SHARDMILL_RANK", "0")) == int(os.environ.get("SHARDMILL_WORLD_SIZE", "1")) - 1
        ):
            self._on_call()


def _with_tick(on_call, image_shape, num_classes):
    return keras.Sequential(
        [keras.Input(image_shape), _Tick(on_call), keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


def exploding(image_shape, num_classes):
    def explode():
        print("the second layer smokes")
        raise ValueError("the third layer exploded")

    return _with_tick(explode, image_shape, num_classes)


def killed(image_shape, num_classes):
    return _with_tick(lambda: os.kill(os.getpid(), signal.SIGKILL), image_shape, num_classes)


class WithArguments(keras.Model):
    """Keras cannot write down what it was called with, and it says nothing of it."""

    def __init__(self, width, num_classes):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.hidden = keras.layers.Dense(width, activation="relu")
        self.dropout = SampleDropout(0.5)
        self.out = keras.layers.Dense(num_classes)

    def call(self, inputs, training=False):
        return self.out(self.dropout(self.hidden(self.flatten(inputs)), training=training))


class WithTensorFlow(WithArguments):
    """Calls TensorFlow itself, so that its layers do not tell what it computes."""

    def call(self, inputs, training=False):
        return tf.square(super().call(inputs, training=training))


class WithConfig(WithTensorFlow):
    """Hard to inline, but can be made again from its config."""

    def __init__(self, width, num_classes, **more):
        super().__init__(width, num_classes)
        self.arguments = {"width": width, "num_classes": num_classes}

    def get_config(self):
        return self.arguments


class Moody(keras.layers.Layer):
    """Computes something else each time that it is traced."""

    def __init__(self):
        super().__init__()
        self.mood = [0.0]

    def call(self, inputs):
        self.mood[0] += 1.0
        return inputs * self.mood[0]


def with_arguments(image_shape, num_classes):
    return WithArguments(8, num_classes)


def with_tensorflow(image_shape, num_classes):
    return WithTensorFlow(8, num_classes)


def with_config(image_shape, num_classes):
    return WithConfig(8, num_classes)


def moody(image_shape, num_classes):
    return keras.Sequential(
        [keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes), Moody()]
    )


def drawn(image_shape, num_classes):
    """Its configuration is drawn: equal for equal seeds."""
    rate = float(keras.random.uniform((), maxval=0.4))
    layers = [keras.layers.Flatten(), keras.layers.Dropout(rate), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])


def chatty(image_shape, num_classes):
    """Says so while it is built."""
    print("the first layer is built")
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
