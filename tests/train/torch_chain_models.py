"""PyTorch modules that a pipeline can cut, or cannot; this file imports no Keras."""

from __future__ import annotations

import math

import torch
from torch import nn


def stateful_chain(image_shape, num_classes):
    """Dropout, and no batch norm: what a pipeline of three stages takes."""
    side = ((image_shape[0] - 3) // 2 + 1 - 3) // 2 + 1
    return nn.Sequential(
        nn.Conv2d(image_shape[2], 8, 3, stride=2), nn.ReLU(), nn.Dropout(0.2),
        nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5),
        nn.Linear(8 * side**2, num_classes),
    )  # fmt: skip


class Skipping(nn.Module):
    """What it says it computes in a row leaves out an addition."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        size = math.prod(image_shape)
        self.flat, self.inner, self.head = nn.Flatten(), nn.Linear(size, size), nn.Linear(size, num_classes)

    def forward(self, images_NCHW):
        flat = self.flat(images_NCHW)
        return self.head(flat + self.inner(flat))

    def stages(self):
        return [self.flat, self.inner, self.head]


def skipping(image_shape, num_classes):
    return Skipping(image_shape, num_classes)


def tied(image_shape, num_classes):
    """Two layers with the same weights."""
    size = math.prod(image_shape)
    first, second = nn.Linear(size, size), nn.Linear(size, size)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, second, nn.Linear(size, num_classes))


class Counting(nn.Linear):
    """Counts what it has seen in training, and keeps a mask that the first pass fills."""

    num_images: torch.Tensor
    mask: torch.Tensor

    def __init__(self, size):
        super().__init__(size, size)
        self.register_buffer("num_images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(size), persistent=False)

    def forward(self, values):
        self.mask.fill_(1)
        if self.training:
            self.num_images += len(values)
        return super().forward(values * self.mask)


def counting(image_shape, num_classes):
    size = math.prod(image_shape)
    return nn.Sequential(nn.Flatten(), Counting(size), nn.Linear(size, num_classes))
