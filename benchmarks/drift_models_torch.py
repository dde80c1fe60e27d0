"""The models of `world_size_drift.py` in PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn


def cnn(image_shape: tuple[int, int, int], num_classes: int, kind: str) -> Any:
    """Two convolutions, with what the words of `kind` say behind each, and a linear layer; sides divide by 4."""
    layers: list[nn.Module] = []
    height, width, channels = image_shape
    for num_channels in (32, 64):
        strides = 1 if "pool" in kind else 2
        layers.append(nn.Conv2d(channels, num_channels, 3, strides, padding=1, bias="norm" not in kind))
        layers += [nn.BatchNorm2d(num_channels)] if "norm" in kind else []
        layers.append(nn.ReLU() if "relu" in kind else nn.GELU())
        layers += [nn.MaxPool2d(2)] if "pool" in kind else []
        channels = num_channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * (height // 4) * (width // 4), num_classes))


smooth = partial(cnn, kind="smooth")
relu = partial(cnn, kind="relu")
relu_pool = partial(cnn, kind="relu_pool")
relu_pool_norm = partial(cnn, kind="relu_pool_norm")
