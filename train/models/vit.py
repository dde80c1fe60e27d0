"""A vision transformer (Dosovitskiy et al., arXiv:2010.11929), small enough to train on a CPU.

Like small_cnn it has no batch norm, so a global batch gives the same update at every world size; with dropout, too, for
each sample has its own.
"""

from __future__ import annotations

from typing import Any

PATCHES_PER_SIDE = 8
WIDTH = 128
NUM_BLOCKS = 4
NUM_HEADS = 4


def vit(image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.0) -> Any:
    """Images of any size, padded to whole patches -> `num_classes` float32 logits.

    `dropout`: its rate behind the embedding and behind both halves of each block.
    """
    import keras

    from train.layers.keras import SampleDropout

    def dropped(x: Any) -> Any:
        return SampleDropout(dropout)(x) if dropout else x

    height, width, num_channels = image_shape
    side = max(1, round(min(height, width) / PATCHES_PER_SIDE))
    rows, columns = -(-height // side), -(-width // side)
    inputs = keras.Input(image_shape)
    x = keras.layers.ZeroPadding2D(((0, rows * side - height), (0, columns * side - width)))(inputs)
    x = keras.layers.Reshape((rows, side, columns, side * num_channels))(x)
    x = keras.layers.Permute((1, 3, 2, 4))(x)
    x = keras.layers.Reshape((rows * columns, side * side * num_channels))(x)
    # A bias of its own for each place is the position embedding.
    small: Any = keras.initializers.RandomNormal(stddev=0.02)
    x = keras.layers.EinsumDense("npd,de->npe", (rows * columns, WIDTH), bias_axes="pe", bias_initializer=small)(x)
    x = dropped(x)
    for _ in range(NUM_BLOCKS):
        normed = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        attended = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)(normed, normed)
        x = keras.layers.Add()([x, dropped(attended)])
        hidden = keras.layers.LayerNormalization(epsilon=1e-6)(x)
        hidden = keras.layers.Dense(2 * WIDTH, activation="gelu")(hidden)
        x = keras.layers.Add()([x, dropped(keras.layers.Dense(WIDTH)(hidden))])
    x = keras.layers.LayerNormalization(epsilon=1e-6)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    outputs = keras.layers.Dense(num_classes, dtype="float32")(x)
    return keras.Model(inputs, outputs, name="vit")
