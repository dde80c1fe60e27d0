"""Keras models whose outputs are logits or probabilities in ways that their last layer does not tell."""

from __future__ import annotations

import keras


def _inputs_and_logits(image_shape, num_classes, **options):
    inputs = keras.Input(image_shape)
    return inputs, keras.layers.Dense(num_classes, **options)(keras.layers.Flatten()(inputs))


def _model(image_shape, num_classes, last, **options):
    inputs, logits = _inputs_and_logits(image_shape, num_classes, **options)
    return keras.Model(inputs, last(logits))


def nested_softmax(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), _model(image_shape, num_classes, keras.activations.softmax)])


def ops_softmax(image_shape, num_classes):
    return _model(image_shape, num_classes, keras.ops.softmax)


def softmax_of_zeros(image_shape, num_classes):
    return _model(image_shape, num_classes, keras.ops.softmax, kernel_initializer="zeros")


def softmax_then_identity(image_shape, num_classes):
    return _model(image_shape, num_classes, lambda x: keras.layers.Activation("linear")(keras.ops.softmax(x)))


class _Custom(keras.layers.Layer):
    def call(self, inputs):
        exponentials = keras.ops.exp(inputs - keras.ops.max(inputs, axis=1, keepdims=True))
        return exponentials / keras.ops.sum(exponentials, axis=1, keepdims=True)


def own_softmax_layer(image_shape, num_classes):
    return _model(image_shape, num_classes, _Custom())


def nested_sigmoid(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), _model(image_shape, num_classes, keras.activations.sigmoid)])


def ops_sigmoid(image_shape, num_classes):
    return _model(image_shape, num_classes, keras.ops.sigmoid)


def logits(image_shape, num_classes):
    return _model(image_shape, num_classes, lambda x: x)


def zeros(image_shape, num_classes):
    return _model(image_shape, num_classes, lambda x: x, kernel_initializer="zeros")


def constant_distribution(image_shape, num_classes):
    bias = keras.initializers.Constant(1 / num_classes)
    return _model(image_shape, num_classes, lambda x: x, kernel_initializer="zeros", bias_initializer=bias)


def small_relu(image_shape, num_classes):
    small = keras.initializers.RandomNormal(stddev=1e-4, seed=0)
    return _model(image_shape, num_classes, keras.ops.relu, kernel_initializer=small)


def log_softmax(image_shape, num_classes):
    return _model(image_shape, num_classes, keras.ops.log_softmax)


def tanh(image_shape, num_classes):
    return _model(image_shape, num_classes, keras.ops.tanh)


def logits_without_from_logits(image_shape, num_classes):
    model = logits(image_shape, num_classes)
    model.compile(loss="sparse_categorical_crossentropy")
    return model


def softmax_with_from_logits(image_shape, num_classes):
    model = ops_softmax(image_shape, num_classes)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
