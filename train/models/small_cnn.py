"""A small convolutional network for small images: the demo's model, quick on one CPU core.

It has no batch norm and no dropout, so a global batch gives the same update at every world size, up to rounding; and
nothing in it has a kink. With ReLU and max pooling, differences in the last bit between world sizes send a gradient
another way and grow to thousandths of the loss within 100 steps of Adam; as it is they stay below 1e-5
(docs/benchmarks/world_size_drift.md).
"""

from __future__ import annotations

from typing import Any

from train.models.first_values import begun_keras

CHANNELS_OF_STAGES = (64, 128, 256, 256)
LARGEST_FINAL_SIDE = 6


def small_cnn(image_shape: tuple[int, int, int], num_classes: int, *, seed: int | None = None) -> Any:
    """Convolve by steps of two until the map is small, then one dense layer to `num_classes` float32 logits."""
    import keras

    inputs = keras.Input(image_shape)
    x = inputs
    for stage, num_channels in enumerate(channels_of_stages(*image_shape[:2])):
        x = keras.layers.Conv2D(
            num_channels, 3, strides=2, padding="same", activation="gelu", name=f"convolutions_{stage}"
        )(x)
    x = keras.layers.Flatten()(x)
    # Float32 under mixed precision too: sixteen bits are too coarse for a softmax.
    outputs = keras.layers.Dense(num_classes, dtype="float32", name="head")(x)
    return begun_keras(keras.Model(inputs, outputs, name="small_cnn"), seed)


def channels_of_stages(height: int, width: int) -> tuple[int, ...]:
    """The channels of each convolution for images of this size."""
    side, num_stages = halved(min(height, width)), 1
    while side > LARGEST_FINAL_SIDE:
        side, num_stages = halved(side), num_stages + 1
    return tuple(CHANNELS_OF_STAGES[min(stage, len(CHANNELS_OF_STAGES) - 1)] for stage in range(num_stages))


def halved(side: int) -> int:
    return -(-side // 2)
