"""The models of `world_size_drift.py` in Keras."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras


def cnn(image_shape: tuple[int, int, int], num_classes: int, kind: str) -> Any:
    """Two convolutions, with what the words of `kind` say behind each, and a dense layer."""
    layers: list[Any] = []
    for num_channels in (32, 64):
        strides = 1 if "pool" in kind else 2
        layers.append(keras.layers.Conv2D(num_channels, 3, strides, "same", use_bias="norm" not in kind))
        layers += [keras.layers.BatchNormalization()] if "norm" in kind else []
        layers.append(keras.layers.Activation("relu" if "relu" in kind else "gelu"))
        layers += [keras.layers.MaxPooling2D()] if "pool" in kind else []
    return keras.Sequential(
        [keras.Input(image_shape), *layers, keras.layers.Flatten(), keras.layers.Dense(num_classes)]
    )


smooth = partial(cnn, kind="smooth")
relu = partial(cnn, kind="relu")
relu_pool = partial(cnn, kind="relu_pool")
relu_pool_norm = partial(cnn, kind="relu_pool_norm")
