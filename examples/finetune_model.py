"""A model for examples/finetune.toml: MobileNet as Keras ships it, with a new head for your classes."""

import keras

from train.layers.keras import SampleDropout


def mobilenet(image_shape, num_classes):
    """Pixels from 0 to 255 (train.standardize = false), three channels, 32 x 32 or larger -> logits."""
    # Fresh; train.init_from brings trained weights.
    backbone = keras.applications.MobileNet(
        input_shape=image_shape, alpha=0.25, include_top=False, weights=None, pooling="avg"
    )
    inputs = keras.Input(image_shape)
    # Each model of keras.applications says in its documentation which pixels it wants; this one -1 to 1.
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    # training=False keeps the batch norm's trained statistics, also while all weights learn.
    x = backbone(x, training=False)
    # Keras's own Dropout, but the same on any number of ranks.
    x = SampleDropout(0.2)(x)
    # Float32 under train.mixed_precision, too: sixteen bits are too coarse for a softmax.
    outputs = keras.layers.Dense(num_classes, dtype="float32")(x)
    return keras.Model(inputs, outputs)
