"""A model for examples/finetune.toml: MobileNet as Keras ships it, with a new head for your classes."""

import keras

# "imagenet" loads trained weights (one download of 2 MB into ~/.keras; then at least 96 x 96 pixels are sensible). None
# starts from random ones: it works offline, and shows the mechanics but not the benefit. A file works, too: give the
# path of a .weights.h5 that all machines can read.
WEIGHTS = None
# With trained weights, the head alone learns first. Then the whole model: let `shardmill export examples/finetune.toml`
# print the folder of the first training's export, set this to the path of its `model.keras` and train.learning_rate to
# 1e-5 or so, and run again. That starts another training, from these weights.
PHASE_ONE = None
# With random weights the backbone has to learn from the start.
TRAIN_BACKBONE = WEIGHTS is None or PHASE_ONE is not None


def mobilenet(image_shape, num_classes):
    """Pixels from 0 to 255 (train.standardize = false), three channels, 32 x 32 or larger -> logits."""
    backbone = keras.applications.MobileNet(
        input_shape=image_shape, alpha=0.25, include_top=False, weights=WEIGHTS, pooling="avg"
    )
    backbone.trainable = TRAIN_BACKBONE
    inputs = keras.Input(image_shape)
    # Each model of keras.applications says in its documentation which pixels it wants; this one -1 to 1.
    x = keras.layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    # training=False keeps the batch norm's trained statistics, in both phases.
    x = backbone(x) if WEIGHTS is None else backbone(x, training=False)
    x = keras.layers.Dropout(0.2)(x)
    # Float32 under train.mixed_precision, too: sixteen bits are too coarse for a softmax.
    outputs = keras.layers.Dense(num_classes, dtype="float32")(x)
    model = keras.Model(inputs, outputs)
    if PHASE_ONE is not None:
        exported = keras.models.load_model(PHASE_ONE, compile=False)
        # An export adds layers for the inputs and for the class names around the model that was trained.
        trained = next(layer for layer in exported.layers if isinstance(layer, keras.Model))
        model.set_weights(trained.get_weights())
    return model
