"""Draws the values with which a model of ours begins: a function of a seed and a weight's name, in every framework.

A weight is drawn as the layer multiplies by it, inputs first and outputs last, as Keras has it; PyTorch has outputs
first. Its name is PyTorch's with underscores, because names of Keras's layers have no dots there. So a name of
`train.model` and a seed are one training, whichever backend its strategy needs.
"""

from __future__ import annotations

import hashlib
import math
import random
from typing import Any

import numpy as np

from shardmill.mix import mix64_array

FIRST_VALUES = int.from_bytes(b"first")
"""The first word of the mix: order, augmentation and dropout draw from others."""
POSITIONS = "position_bias"
# Whole arrays would need as much memory again for what lies between two steps; this is in a processor's cache.
_BLOCK_WORDS = 1 << 15
_NAMES_IN_TORCH = {"kernel": "weight", "gamma": "weight", "beta": "bias", "attention_output": "out"}


def first_values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32: zeros for a bias, ones for a scale, and else uniform around zero.

    `shape`: (inputs, outputs) of a layer, of a convolution behind the sides of its window. A dense layer's limits are
    those of Glorot and Bengio (2010), a convolution's those of He et al. (arXiv:1502.01852). Positions have a standard
    deviation of 0.02.
    """
    is_bias = name.endswith("bias")
    if name.endswith(POSITIONS):
        limit = 0.02 * math.sqrt(3)
    elif is_bias or len(shape) == 1:
        return np.full(shape, not is_bias, np.float32)
    else:
        *window, num_inputs, num_outputs = shape
        limit = math.sqrt(6 / (math.prod(window) * num_inputs if window else num_inputs + num_outputs))
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
    # Each word has the bits of two.
    num_words = -(-math.prod(shape) // 2)
    values, scale = np.empty(2 * num_words, np.float32), np.float32(limit / (1 << 31))
    for start in range(0, num_words, _BLOCK_WORDS):
        counters = np.arange(start, min(start + _BLOCK_WORDS, num_words), dtype=np.uint64)
        signed = mix64_array(counters, FIRST_VALUES, seed, key).astype("<u8", copy=False).view("<i4")
        np.multiply(signed, scale, out=values[2 * start :][: len(signed)], casting="same_kind", dtype=np.float32)
    return values[: math.prod(shape)].reshape(shape)


def begun_keras(model: Any, seed: int | None) -> Any:
    """`model`, a Keras model whose layers are named as the modules of its PyTorch twin, with its first values.

    `seed`: None for one that follows from Python's generator, which `keras.utils.set_random_seed` seeds.
    """
    seed = random.getrandbits(63) if seed is None else seed
    for variable in model.trainable_variables:
        path = str(variable.path).replace("embedding/bias", f"embedding/{POSITIONS}")
        name = "_".join(_NAMES_IN_TORCH.get(each, each) for each in path.split("/"))
        shape = tuple(variable.shape)
        if len(shape) == 3:
            # Attention has an axis for its heads beside that of a head.
            shape = (shape[0] * shape[1], shape[2]) if name.endswith("out_weight") else (shape[0], shape[1] * shape[2])
        variable.assign(first_values(seed, name, shape).reshape(variable.shape))
    return model


def begin_torch(module: Any, seed: int | None) -> None:
    """Give a PyTorch module its first values; none to parameters without memory.

    `seed`: None for one that follows from PyTorch's generator.
    """
    import torch

    seed = int(torch.randint(1 << 62, (), device="cpu")) if seed is None else seed
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.is_meta:
                continue
            name, shape = name.replace(".", "_"), tuple(weight.shape)
            if weight.ndim == 1 or name.endswith(POSITIONS):
                values = first_values(seed, name, shape)
            else:
                values = np.moveaxis(first_values(seed, name, (*shape[2:], shape[1], shape[0])), (-1, -2), (0, 1))
            weight.copy_(torch.from_numpy(values))
