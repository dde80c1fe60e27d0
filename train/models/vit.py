"""A vision transformer (Dosovitskiy et al., arXiv:2010.11929), small enough to train on a CPU.

Like small_cnn it has no batch norm, so a global batch gives the same update at every world size; with dropout, too, for
each sample has its own.
"""

from __future__ import annotations

from typing import Any

from train.models.first_values import begun_keras

PATCHES_PER_SIDE = 8
WIDTH = 128
NUM_BLOCKS = 4
NUM_HEADS = 4


def vit(image_shape: tuple[int, int, int], num_classes: int, dropout: float = 0.0, *, seed: int | None = None) -> Any:
    """Images of any size, padded to whole patches -> `num_classes` float32 logits.

    `dropout`: its rate behind the embedding and behind both halves of each block. Layers are named as the modules of
    train/models/vit_torch.py.
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
    x = keras.layers.EinsumDense("npd,de->npe", (rows * columns, WIDTH), bias_axes="pe", name="embedding")(x)
    x = dropped(x)
    for block in range(NUM_BLOCKS):
        name = f"blocks_{block}"
        normed = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
        attention = keras.layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS, name=f"{name}_attention")
        x = keras.layers.Add()([x, dropped(attention(normed, normed))])
        hidden = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
        hidden = keras.layers.Dense(2 * WIDTH, activation="gelu", name=f"{name}_fc1")(hidden)
        x = keras.layers.Add()([x, dropped(keras.layers.Dense(WIDTH, name=f"{name}_fc2")(hidden))])
    x = keras.layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    outputs = keras.layers.Dense(num_classes, dtype="float32", name="head")(x)
    return begun_keras(keras.Model(inputs, outputs, name="vit"), seed)
