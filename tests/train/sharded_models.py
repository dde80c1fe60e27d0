"""PyTorch modules that are awkward to shard, cut or divide, and some that divide themselves wrongly; no Keras here."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    """Computes with values while it is built."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.scale = float(torch.linspace(0, 1, 3)[1])

    def forward(self, images_NCHW):
        return self.out(images_NCHW) * self.scale


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


def tied_chain(image_shape, num_classes):
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


class Wrong(nn.Module):
    """One hidden layer, divided by `plan`."""

    plan: ClassVar[dict[str, Any]] = {}
    width = 64

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.wide, self.head = nn.Linear(math.prod(image_shape), self.width), nn.Linear(self.width, num_classes)

    def forward(self, images_NCHW):
        return self.head(self.wide(images_NCHW.flatten(1)).relu())

    def parallelize(self, mesh):
        parallelize_module(self, mesh, self.plan)


class Averaging(Wrong):
    """Averages over what the rank has of the hidden layer."""

    plan: ClassVar = {"wide": ColwiseParallel()}

    def forward(self, images_NCHW):
        hidden_NW = self.wide(images_NCHW.flatten(1)).relu()
        return self.head(hidden_NW.mean(1, keepdim=True).expand(-1, self.width))


class Drawing(Wrong):
    """Draws other numbers on each rank, and only in training."""

    plan: ClassVar = {"wide": ColwiseParallel(), "head": RowwiseParallel()}

    def forward(self, images_NCHW):
        outputs_NK = super().forward(images_NCHW)
        if self.training:
            outputs_NK = outputs_NK * torch.bernoulli(torch.full_like(outputs_NK, 0.5), generator=self.generator)
        return outputs_NK

    def parallelize(self, mesh):
        super().parallelize(mesh)
        self.generator = torch.Generator().manual_seed(mesh.get_local_rank())


class Unsummed(Wrong):
    """Computes what it should, and in the backward pass one rank alone gets the gradient of the first layer."""

    plan: ClassVar = {"wide": ColwiseParallel(), "head": RowwiseParallel()}
    rank = 0

    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes)
        num_pixels = math.prod(image_shape)
        self.first = nn.Linear(num_pixels, num_pixels)

    def forward(self, images_NCHW):
        features = self.first(images_NCHW.flatten(1))
        if self.training:
            features.register_hook(lambda gradient: gradient * (self.rank == 0))
        return self.head(self.wide(features).relu())

    def parallelize(self, mesh):
        super().parallelize(mesh)
        self.rank = mesh.get_local_rank()


class Misspelt(Wrong):
    plan: ClassVar = {"wyde": ColwiseParallel(), "head": RowwiseParallel()}


class Half(Wrong):
    plan: ClassVar = {"wide": ColwiseParallel()}


class Odd(Wrong):
    plan: ClassVar = {"wide": ColwiseParallel(), "head": RowwiseParallel()}
    width = 63


class Raising(Wrong):
    def parallelize(self, mesh):
        raise KeyError("no such layer")
