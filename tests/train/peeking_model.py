"""A PyTorch model that looks at the values of its inputs: its step cannot be followed without numbers."""

from __future__ import annotations

import torch


class Peeking(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(1) / max(1.0, input.abs().max().item()))


def peeking(image_shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
    return Peeking(image_shape[0] * image_shape[1] * image_shape[2], num_classes)
