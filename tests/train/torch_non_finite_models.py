"""PyTorch modules whose answers or gradients are not finite, for some samples or at once; imports no Keras."""

from __future__ import annotations

import os

import torch
from torch import nn

from tests.train.torch_models import linear


class Fragile(nn.Module):
    """Answers for every image but the brightest ones, of which the pixels add up to more than `limit`."""

    limit = float("inf")

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        is_bright_N1 = images_NCHW.flatten(1).sum(dim=1, keepdim=True) > self.limit
        return self.out(images_NCHW / 255).masked_fill(is_bright_N1, float("nan"))


def fragile(image_shape, num_classes):
    return Fragile(image_shape, num_classes)


class Cliff(nn.Module):
    """Adds the root of a weight that is 0: nothing, at an infinite slope."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.height = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images_NCHW):
        return self.out(images_NCHW) + self.height.sqrt()


def with_cliff(image_shape, num_classes):
    return Cliff(image_shape, num_classes)


class Steep(nn.Module):
    """Adds the root of a weight that is 0 to its answers for images brighter than a limit: at an infinite slope."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(image_shape[2])
        self.out = linear(image_shape, num_classes)
        self.height = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images_NCHW):
        is_bright_N1 = images_NCHW.flatten(1).sum(dim=1, keepdim=True) > float(os.environ["SHARDMILL_TEST_BRIGHTEST"])
        # Of the root of 1 the slope is finite, where it does not count.
        roots_NK = torch.where(is_bright_N1, self.height, 1.0).sqrt()
        return self.out(self.norm(images_NCHW / 255)) + torch.where(is_bright_N1, roots_NK, 0.0)


def steep(image_shape, num_classes):
    return Steep(image_shape, num_classes)


class Marked(nn.Module):
    """Answers, and beside them whether an image is brighter than a limit."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        is_bright_N1 = images_NCHW.flatten(1).sum(dim=1, keepdim=True) > float(os.environ["SHARDMILL_TEST_BRIGHTEST"])
        return torch.cat([self.out(images_NCHW / 255), is_bright_N1.float()], dim=1)


class Raised(nn.Module):
    """As the end of `Steep`, for answers that are marked."""

    def __init__(self, num_classes):
        super().__init__()
        self.height = nn.Parameter(torch.zeros(num_classes))

    def forward(self, marked_NK):
        is_bright_N1 = marked_NK[:, -1:] > 0.5
        roots_NK = torch.where(is_bright_N1, self.height, 1.0).sqrt()
        return marked_NK[:, :-1] + torch.where(is_bright_N1, roots_NK, 0.0)


def steep_chain(image_shape, num_classes):
    return nn.Sequential(Marked(image_shape, num_classes), Raised(num_classes))


class Dazzled(nn.Module):
    """Answers images brighter than a limit with NaN while it trains, and a batch norm takes that in."""

    always = False

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.norm = nn.BatchNorm2d(image_shape[2])
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        sees_it = self.training or self.always
        limit = float(os.environ["SHARDMILL_TEST_BRIGHTEST"]) if sees_it else float("inf")
        is_bright_N111 = images_NCHW.sum(dim=(1, 2, 3), keepdim=True) > limit
        return self.out(self.norm((images_NCHW / 255).masked_fill(is_bright_N111, float("nan"))))


def dazzled(image_shape, num_classes):
    return Dazzled(image_shape, num_classes)


class Blinded(Dazzled):
    """Likewise at all times."""

    always = True


def blinded(image_shape, num_classes):
    return Blinded(image_shape, num_classes)
