"""PyTorch modules with blocks, for the tests of `train.memory.activation_checkpointing`; this file imports no Keras."""

from __future__ import annotations

import torch
from torch import nn

from tests.train.torch_models import linear


class Block(nn.Module):
    """What deep networks repeat, with state of each kind; counts how often it computes."""

    num_computed = 0

    def __init__(self, channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels, momentum=0.2)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, images_NCHW):
        Block.num_computed += self.training
        return images_NCHW + self.dropout(torch.tanh(self.conv(self.norm(images_NCHW))))


def deep(image_shape, num_classes):
    """Blocks of one class, and a chain of single layers."""
    chain = nn.Sequential(
        nn.Conv2d(image_shape[2], 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3),
        nn.Hardswish(inplace=True),
    )  # fmt: skip
    side = (image_shape[0] - 3) // 4 + 1
    return nn.Sequential(chain, Block(8), Block(8), nn.Flatten(), nn.Linear(8 * side**2, num_classes))


class RoomyBlock(nn.Module):
    """Keeps 24 MiB of each image of 16 x 16 for the backward pass, and gives 3 KiB on."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images_NCHW):
        spread = images_NCHW.flatten(1).repeat(1, 4096)
        return images_NCHW + (spread * self.scale).tanh().mean(dim=1).view(-1, 1, 1, 1)


def roomy_blocks(image_shape, num_classes):
    return nn.Sequential(*(RoomyBlock() for _ in range(12)), *linear(image_shape, num_classes))


class ChangesInputs(nn.Module):
    """Its second block's input is changed in place when that has been used."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.first, self.second = Block(image_shape[2]), Block(image_shape[2])
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        between = self.first(images_NCHW)
        outputs = self.out(self.second(between))
        between.add_(1)
        return outputs


def changes_inputs(image_shape, num_classes):
    return ChangesInputs(image_shape, num_classes)
