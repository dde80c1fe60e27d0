"""PyTorch modules with a `parallelize(mesh)` that is wrong, each in its own way; this file imports no Keras."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


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
