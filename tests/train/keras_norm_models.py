"""A Keras model whose moving statistics lag behind, for the tests of what is then said."""

from __future__ import annotations

import keras


def late_statistics(image_shape, num_classes):
    """Its inputs are far from 0, and its moving statistics begin there and hardly move."""
    return keras.Sequential(
        [
            keras.Input(image_shape),
            keras.layers.Rescaling(1.0, offset=500.0),
            keras.layers.BatchNormalization(momentum=0.99999),
            keras.layers.Flatten(),
            keras.layers.Dense(num_classes),
        ]
    )
