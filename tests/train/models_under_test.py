"""Users' own models for the tests of the training loop: with state, compiled in every way, and wrong in every way."""

from __future__ import annotations

import keras

from train.layers.keras import SampleDropout
from train.models.small_cnn import small_cnn
from train.models.vit import vit


def stateful(image_shape, num_classes):
    """Batch norm and dropout: state that is not weights and differs from rank to rank."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(8, 3, strides=2),
            keras.layers.BatchNormalization(momentum=0.8),
            keras.layers.ReLU(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(num_classes, kernel_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )


def smooth(image_shape, num_classes):
    """The demo's model, which is the same at every world size, with a dropout that is, too."""
    *layers, out = small_cnn(image_shape, num_classes).layers
    return keras.Sequential([*layers, SampleDropout(0.2), out])


def dropping_vit(image_shape, num_classes):
    return vit(image_shape, num_classes, dropout=0.1)


def normed(image_shape, num_classes):
    """Two batch norms and no kink; no bias before them, whose gradient would be rounding alone."""
    layers = []
    for _ in range(2):
        layers += [keras.layers.Conv2D(8, 3, strides=2, use_bias=False), keras.layers.BatchNormalization(momentum=0.8)]
        layers += [keras.layers.Activation("gelu"), SampleDropout(0.2)]
    return keras.Sequential(
        [keras.Input(image_shape), *layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


class OwnNorm(keras.layers.BatchNormalization):
    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)


def with_own_norm(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), OwnNorm(), *linear(image_shape, num_classes).layers])


class NormOfPatches(keras.layers.Layer):
    """Normalizes more rows than the batch has samples."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization()

    def call(self, inputs, training=False):
        _, height, width, channels = inputs.shape
        rows = keras.ops.reshape(inputs, (-1, width, channels))
        return keras.ops.reshape(self.norm(rows, training=training), (-1, height, width, channels))


def with_norm_of_patches(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), NormOfPatches(), *linear(image_shape, num_classes).layers])


class CountOfBatches(keras.layers.Layer):
    """Counts the batches that it is trained with, those of several processes at once, too: Keras's own `assign_add`
    reads, adds and then writes."""

    def build(self, input_shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    def call(self, inputs, training=False):
        if training:
            self.count.value.assign_add(1.0)
        return inputs


counting_models: list[keras.Model] = []
"""What `counting` has built in this process."""


def counting(image_shape, num_classes):
    model = keras.Sequential(
        [
            keras.Input(image_shape),
            CountOfBatches(),
            keras.layers.Conv2D(8, 3, strides=2, activation="relu"),
            SampleDropout(0.1),
            keras.layers.Flatten(),
            keras.layers.Dense(num_classes),
        ]
    )
    counting_models.append(model)
    return model


def wide(image_shape, num_classes):
    """With far more activations than weights."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(num_classes),
        ]
    )


class DropoutOfPatches(keras.layers.Layer):
    """Drops in more rows than the batch has samples."""

    def __init__(self):
        super().__init__()
        self.dropout = SampleDropout(0.5)

    def call(self, inputs, training=False):
        _, height, width, channels = inputs.shape
        rows = keras.ops.reshape(inputs, (-1, width, channels))
        return keras.ops.reshape(self.dropout(rows, training=training), (-1, height, width, channels))


def with_dropout_of_patches(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), DropoutOfPatches(), *linear(image_shape, num_classes).layers])


class Cliff(keras.layers.Layer):
    """Adds the root of a weight that is 0: nothing, at an infinite slope."""

    def build(self, input_shape):
        self.height = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="height")

    def call(self, inputs):
        return inputs + keras.ops.sqrt(self.height)


def with_cliff(image_shape, num_classes):
    return keras.Sequential([*linear(image_shape, num_classes).layers, Cliff()])


def linear(image_shape, num_classes, activation=None, **regularizer):
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Flatten(),
            keras.layers.Dense(num_classes, activation=activation, **regularizer),
        ]
    )


def regularized(image_shape, num_classes):
    return linear(image_shape, num_classes, kernel_regularizer=keras.regularizers.L2(0.1))


class Subclassed(keras.Model):
    """Has no variables before its first call, and one that nothing depends on."""

    def __init__(self, num_classes):
        super().__init__()
        self.flatten = keras.layers.Flatten()
        self.out = keras.layers.Dense(num_classes)
        self.unused = self.add_weight(shape=(3,), name="unused")

    def call(self, inputs):
        return self.out(self.flatten(inputs))


def subclassed(image_shape, num_classes):
    return Subclassed(num_classes)


def compiled_by_name(image_shape, num_classes):
    model = linear(image_shape, num_classes, "softmax")
    model.compile(optimizer=keras.optimizers.SGD(0.125), loss="sparse_categorical_crossentropy")
    return model


def compiled_categorical(image_shape, num_classes):
    model = linear(image_shape, num_classes, "softmax")
    model.compile(optimizer=keras.optimizers.SGD(0.125), loss="categorical_crossentropy")
    return model


def compiled_with_object(image_shape, num_classes):
    model = linear(image_shape, num_classes)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.125, 1, 0.5)), loss=loss)
    return model


def compiled_with_function(image_shape, num_classes):
    def squared_margin(labels_N, outputs_NK):
        return keras.ops.sum(keras.ops.square(outputs_NK - keras.ops.one_hot(labels_N, num_classes)), axis=1)

    model = linear(image_shape, num_classes)
    model.compile(optimizer="adam", loss=squared_margin)
    return model


def compiled_with_mean(image_shape, num_classes):
    model = linear(image_shape, num_classes)
    model.compile(optimizer="adam", loss=lambda labels_N, outputs_NK: keras.ops.mean(outputs_NK))
    return model


def one_class_too_many(image_shape, num_classes):
    return linear(image_shape, num_classes + 1)


def for_larger_images(image_shape, num_classes):
    return linear((224, 224, 3), num_classes)


def with_features(image_shape, num_classes):
    inputs = keras.Input(image_shape)
    return keras.Model(inputs, {"logits": linear(image_shape, num_classes)(inputs), "features": inputs})


def no_model(image_shape, num_classes):
    return "a model"


def failing(image_shape, num_classes):
    raise RuntimeError("no such backbone")


def leaving(image_shape, num_classes):
    raise SystemExit(0)


class LeavingLayer(keras.layers.Layer):
    def call(self, inputs):
        raise SystemExit(0)


def leaving_when_called(image_shape, num_classes):
    return keras.Sequential([*linear(image_shape, num_classes).layers, LeavingLayer()])


def frozen(image_shape, num_classes):
    model = linear(image_shape, num_classes)
    model.trainable = False
    return model


class Counting(keras.layers.Layer):
    """Counts how often it is called in training; while a step is traced, once for each time it will compute.

    Dropout inside it asks the layers around whether this is training.
    """

    num_called = 0

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.3)

    def call(self, inputs):
        Counting.num_called += 1
        return self.dropout(inputs)


def deep(image_shape, num_classes):
    """Residual blocks with state of each kind, behind a chain of layers that is a model by itself."""
    chain = keras.Sequential(
        [keras.Input(image_shape), keras.layers.Conv2D(8, 3, strides=4), keras.layers.BatchNormalization(momentum=0.8),
         keras.layers.ReLU()]
    )  # fmt: skip
    inputs = keras.Input(image_shape)
    x = chain(inputs)
    for _ in range(3):
        y = keras.layers.BatchNormalization(momentum=0.8)(x)
        y = keras.layers.Conv2D(8, 3, padding="same", activation="tanh", activity_regularizer="l2")(y)
        x = keras.layers.Add()([x, Counting()(y)])
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(num_classes, kernel_regularizer="l2")(x))


class Drawing(keras.layers.Layer):
    """Draws other numbers each time, without a generator of Keras."""

    def call(self, inputs):
        import tensorflow as tf

        return inputs * tf.random.uniform(tf.shape(inputs))


def drawing(image_shape, num_classes):
    layers = [layer for _ in range(8) for layer in (keras.layers.Conv2D(4, 1), Drawing())]
    return keras.Sequential(
        [keras.Input(image_shape), *layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )
