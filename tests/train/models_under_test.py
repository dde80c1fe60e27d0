"""Users' own Keras models: with state, compiled in every way, and wrong, failing or hard to save in every way."""

from __future__ import annotations

import os
import signal

import keras
import tensorflow as tf

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
    model = keras.Sequential([keras.Input(image_shape), CountOfBatches(),
                              keras.layers.Conv2D(8, 3, strides=2, activation="relu"), SampleDropout(0.1),
                              keras.layers.Flatten(), keras.layers.Dense(num_classes)])  # fmt: skip
    counting_models.append(model)
    return model


def wide(image_shape, num_classes):
    """With far more activations than weights."""
    return keras.Sequential([keras.Input(image_shape), keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
                             keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(num_classes)])  # fmt: skip


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
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(),
                             keras.layers.Dense(num_classes, activation=activation, **regularizer)])  # fmt: skip


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


class _Custom(keras.layers.Layer):
    def call(self, inputs):
        exponentials = keras.ops.exp(inputs - keras.ops.max(inputs, axis=1, keepdims=True))
        return exponentials / keras.ops.sum(exponentials, axis=1, keepdims=True)


def _behind(last, *, nested=False, bias=None, **options):
    """Factories of one layer and what follows it: outputs that are logits or probabilities, whatever comes last."""

    def build(image_shape, num_classes):
        if bias == "equal":
            options["bias_initializer"] = keras.initializers.Constant(1 / num_classes)
        inputs = keras.Input(image_shape)
        outputs = (_Custom() if last is _Custom else last)(
            keras.layers.Dense(num_classes, **options)(keras.layers.Flatten()(inputs))
        )
        model = keras.Model(inputs, outputs)
        return keras.Sequential([keras.Input(image_shape), model]) if nested else model

    return build


nested_softmax = _behind(keras.activations.softmax, nested=True)
ops_softmax = _behind(keras.ops.softmax)
softmax_of_zeros = _behind(keras.ops.softmax, kernel_initializer="zeros")
softmax_then_identity = _behind(lambda x: keras.layers.Activation("linear")(keras.ops.softmax(x)))
own_softmax_layer = _behind(_Custom)
nested_sigmoid = _behind(keras.activations.sigmoid, nested=True)
ops_sigmoid = _behind(keras.ops.sigmoid)
logits = _behind(lambda x: x)
zeros = _behind(lambda x: x, kernel_initializer="zeros")
constant_distribution = _behind(lambda x: x, kernel_initializer="zeros", bias="equal")
small_relu = _behind(keras.ops.relu, kernel_initializer=keras.initializers.RandomNormal(stddev=1e-4, seed=0))
log_softmax = _behind(keras.ops.log_softmax)
tanh = _behind(keras.ops.tanh)


def logits_without_from_logits(image_shape, num_classes):
    model = logits(image_shape, num_classes)
    model.compile(loss="sparse_categorical_crossentropy")
    return model


def softmax_with_from_logits(image_shape, num_classes):
    model = ops_softmax(image_shape, num_classes)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


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


def late_statistics(image_shape, num_classes):
    """Its inputs are far from 0, and its moving statistics begin there and hardly move."""
    return keras.Sequential([keras.Input(image_shape), keras.layers.Rescaling(1.0, offset=500.0),
                             keras.layers.BatchNormalization(momentum=0.99999), keras.layers.Flatten(),
                             keras.layers.Dense(num_classes)])  # fmt: skip


def relu_cnn(image_shape, num_classes):
    layers = []
    for num_channels in (8, 16):
        layers += [keras.layers.Conv2D(num_channels, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    return keras.Sequential(
        [keras.Input(image_shape), *layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


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
