"""Modules that are awkward to shard: fused, large, computing in their constructors, with tied weights."""

from __future__ import annotations

import torch
from torch import nn

from tests.train.torch_models import linear
from train.models.vit_torch import vit, vit_base


def torchvisions_vit(image_shape, num_classes):
    """Its attention is fused: query, key and value are one matrix."""
    from torchvision.models import VisionTransformer

    sizes = {"image_size": image_shape[0], "patch_size": 4, "num_layers": 2, "num_heads": 4}
    return VisionTransformer(**sizes, hidden_dim=32, mlp_dim=64, num_classes=num_classes)


def base_vit(image_shape, num_classes):
    """85 million weights, and few tokens."""
    return vit_base(image_shape, num_classes, patch_size=8)


def wide_vit(image_shape, num_classes):
    return vit(image_shape, num_classes, width=192, num_blocks=2, num_heads=4, mlp_ratio=4)


class Computing(nn.Module):
    """Computes with numbers while it is built."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.scale = float(torch.linspace(0, 1, 3)[1])

    def forward(self, images_NCHW):
        return self.out(images_NCHW) * self.scale


def computing(image_shape, num_classes):
    return Computing(image_shape, num_classes)


def computing_chain(image_shape, num_classes):
    return nn.Sequential(Computing(image_shape, 16), nn.GELU(), nn.Linear(16, num_classes))


def tied(image_shape, num_classes):
    """Two layers with one weight, and a buffer that no file has."""
    first, second = nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    second.register_buffer("noise", torch.full((16,), 0.5), persistent=False)
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * image_shape[2], 16), nn.GELU(), first, nn.GELU(), second,
        nn.Linear(16, num_classes),
    )  # fmt: skip
