"""ResNet-50 (He et al., arXiv:1512.03385) as Keras ships it, with fresh weights."""

from __future__ import annotations

from typing import Any

from shardmill.errors import UsageError
from train.models.first_values import begun_keras

SMALLEST_SIDE = 32


def resnet50(image_shape: tuple[int, int, int], num_classes: int, *, seed: int | None = None) -> Any:
    """Standardized images of at least 32 x 32 with one or three channels -> `num_classes` float32 logits."""
    import keras

    height, width, num_channels = image_shape
    if min(height, width) < SMALLEST_SIDE:
        raise UsageError(
            f'train.model = "resnet50" with images of {height} x {width}',
            f"expected at least {SMALLEST_SIDE} x {SMALLEST_SIDE}",
            f'set etl.image_size >= {SMALLEST_SIDE}, or train.model = "small_cnn"',
        )
    inputs = keras.Input(image_shape)
    x = keras.layers.Concatenate()([inputs] * 3) if num_channels == 1 else inputs
    # Keras annotates `weights` as a string, and documents None for fresh ones.
    fresh: Any = None
    backbone = keras.applications.ResNet50(
        include_top=False, weights=fresh, input_shape=(height, width, 3), pooling="avg"
    )
    features = backbone(x)
    outputs = keras.layers.Dense(num_classes, dtype="float32", name="head")(features)
    return begun_keras(keras.Model(inputs, outputs, name="resnet50_classifier"), seed)
