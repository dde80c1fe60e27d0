"""Networks as most people train them, in Keras: with kinks, at which a rounding error may change a gradient."""

from __future__ import annotations

import keras


def relu_cnn(image_shape, num_classes):
    layers = []
    for num_channels in (8, 16):
        layers += [keras.layers.Conv2D(num_channels, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D()]
    return keras.Sequential(
        [keras.Input(image_shape), *layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )
