"""The network of train/models/small_cnn.py as a PyTorch module: same parameters, same function, same first values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from train.models.first_values import begin_torch
from train.models.small_cnn import channels_of_stages, halved


class Convolution(nn.Conv2d):
    """images_NCHW -> images of half the sides, rounded up: padded as Keras does (`same`), with GELU."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Where one side gets more, it is the end.
        height, width = (2 * (halved(side) - 1) + 3 - side for side in input.shape[2:])
        padding = (width // 2, width - width // 2, height // 2, height - height // 2)
        return nn.functional.gelu(super().forward(nn.functional.pad(input, padding)))


class FlattenByPixel(nn.Module):
    """images_NCHW -> features of each, in Keras's order: by row, column, channel."""

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        return images_NCHW.permute(0, 2, 3, 1).flatten(1)


def small_cnn(image_shape: tuple[int, int, int], num_classes: int, *, seed: int | None = None) -> Any:
    height, width, num_inputs = image_shape
    convolutions = []
    for num_channels in channels_of_stages(height, width):
        convolutions.append(Convolution(num_inputs, num_channels, 3, stride=2))
        height, width, num_inputs = halved(height), halved(width), num_channels
    head = nn.Linear(height * width * num_inputs, num_classes)
    parts = {"convolutions": nn.Sequential(*convolutions), "flatten": FlattenByPixel(), "head": head}
    model = nn.Sequential(OrderedDict(parts))
    begin_torch(model, seed)
    return model
