"""PyTorch modules as users write them, for the tests of the torch backend; this file imports no Keras."""

from __future__ import annotations

import math
import os
import time
from typing import ClassVar

import torch
from torch import nn

from train.layers.torch import SampleDropout
from train.models.vit_torch import vit


def linear(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, num_classes))


def huge(image_shape, num_classes):
    """Of 4 TB: no host has the memory, and the allocator refuses it at once."""
    height, width, channels = image_shape
    side = 1_000_000
    layers = [nn.Linear(height * width * channels, side), nn.Linear(side, side), nn.Linear(side, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def wide(image_shape, num_classes):
    """With far more activations than weights."""
    return nn.Sequential(
        nn.Conv2d(image_shape[2], 32, 3, padding=1), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, num_classes),
    )  # fmt: skip


def relu_cnn(image_shape, num_classes):
    """As in ordinary_models.py."""
    layers, channels = [], image_shape[2]
    for num_channels in (8, 16):
        layers += [nn.Conv2d(channels, num_channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        channels = num_channels
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * (image_shape[0] // 4) ** 2, num_classes))


class Roomy(nn.Module):
    """Needs 55 MiB for each image of 16 x 16 that it computes at a time, and few weights; counts the images."""

    most_images = 0

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.inner = linear(image_shape, num_classes)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images_NCHW):
        if self.training:
            Roomy.most_images = max(Roomy.most_images, len(images_NCHW))
        # Tensors too large for the heap: of smaller ones the allocator keeps now more, now less.
        spread = images_NCHW.flatten(1).repeat(1, 4096)
        return self.inner(images_NCHW) + (spread * self.scale).tanh().mean(dim=1, keepdim=True)


def roomy(image_shape, num_classes):
    return Roomy(image_shape, num_classes)


def smooth(image_shape, num_classes):
    """Without a kink and without anything that mixes samples: the same at every world size."""
    channels = image_shape[2]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GELU(),
        nn.Flatten(),
        SampleDropout(0.2),
        nn.Linear(32 * -(-image_shape[0] // 4) * -(-image_shape[1] // 4), num_classes),
    )


class Routed(nn.Module):
    """A model in which bright images take a second way: a batch without any leaves its weights out. It comes last in
    the model, and behind weights that nothing depends on. Remembers how many bright images there were at a time."""

    num_bright: ClassVar[set[int]] = set()

    def __init__(self, first_way, image_shape, num_classes):
        super().__init__()
        self.out = first_way(image_shape, num_classes)
        self.unused = nn.Linear(64, 64)
        self.of_bright = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        outputs_NK, is_bright_N = self.out(images_NCHW), images_NCHW.flatten(1).mean(dim=1) > 0.06
        if not self.training:
            # torch.export follows no branch.
            return outputs_NK + torch.where(is_bright_N[:, None], self.of_bright(images_NCHW), 0.0)
        Routed.num_bright.add(int(is_bright_N.sum()))
        if is_bright_N.any():
            places = is_bright_N.nonzero().flatten()
            outputs_NK = outputs_NK.index_add(0, places, self.of_bright(images_NCHW[places]))
        return outputs_NK


def routed(image_shape, num_classes):
    return Routed(smooth, image_shape, num_classes)


def stateful(image_shape, num_classes):
    """Batch norm and dropout: state that is not weights and differs from rank to rank."""
    return nn.Sequential(
        nn.Conv2d(image_shape[2], 8, 3, stride=2),
        nn.BatchNorm2d(8, momentum=0.2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(8 * ((image_shape[0] - 3) // 2 + 1) ** 2, num_classes),
    )


def normed(image_shape, num_classes):
    """Two batch norms and no kink; no bias before them, whose gradient would be rounding alone."""
    side = ((image_shape[0] - 3) // 2 + 1 - 3) // 2 + 1
    layers, channels = [], image_shape[2]
    for _ in range(2):
        layers += [nn.Conv2d(channels, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8, momentum=0.2), nn.GELU()]
        layers.append(SampleDropout(0.2))
        channels = 8
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * side**2, num_classes))


def normed_vector(image_shape, num_classes):
    """In training PyTorch takes no single image: of one there are no statistics."""
    size = math.prod(image_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.BatchNorm1d(8), nn.Linear(8, num_classes))


def routed_normed(image_shape, num_classes):
    return Routed(normed, image_shape, num_classes)


class OwnNorm(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


def with_own_norm(image_shape, num_classes):
    return nn.Sequential(OwnNorm(image_shape[2]), linear(image_shape, num_classes))


class NormOfPatches(nn.Module):
    """Normalizes more rows than the batch has samples."""

    def __init__(self, image_shape):
        super().__init__()
        self.norm = nn.BatchNorm1d(image_shape[1])

    def forward(self, images_NCHW):
        return self.norm(images_NCHW.flatten(0, 2)).view(images_NCHW.shape)


def with_norm_of_patches(image_shape, num_classes):
    return nn.Sequential(NormOfPatches(image_shape), linear(image_shape, num_classes))


class WithUnused(nn.Module):
    """Has a weight that nothing depends on."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, images_NCHW):
        return self.out(images_NCHW)


def with_unused(image_shape, num_classes):
    return WithUnused(image_shape, num_classes)


def one_class_too_many(image_shape, num_classes):
    return linear(image_shape, num_classes + 1)


def frozen(image_shape, num_classes):
    return linear(image_shape, num_classes).requires_grad_(False)


class WithFeatures(nn.Module):
    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        return {"logits": self.out(images_NCHW), "features": images_NCHW}


def with_features(image_shape, num_classes):
    return WithFeatures(image_shape, num_classes)


def no_model(image_shape, num_classes):
    return "a module"


class Steep(nn.Module):
    """Has far larger gradients than its outputs would give it, which float16 must hold."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        outputs_NK = self.out(images_NCHW).float()
        return outputs_NK + float(os.environ["SHARDMILL_TEST_STEEPNESS"]) * (outputs_NK - outputs_NK.detach())


def steep(image_shape, num_classes):
    return Steep(image_shape, num_classes)


class SoftmaxElsewhere(nn.Module):
    """Has a softmax, last in order, that training does not use."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, images_NCHW):
        return self.out(images_NCHW)


def softmax_elsewhere(image_shape, num_classes):
    return SoftmaxElsewhere(image_shape, num_classes)


def with_softmax(image_shape, num_classes):
    return nn.Sequential(linear(image_shape, num_classes), nn.Softmax(dim=1))


class Branching(nn.Module):
    """Looks at a value of a tensor, which torch.export cannot follow."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        return self.out(images_NCHW) if images_NCHW.max() > -1e9 else self.out(-images_NCHW)


def branching(image_shape, num_classes):
    return Branching(image_shape, num_classes)


class LateOnRank1(nn.Module):
    """Rests in each step, on one rank of several."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        if self.training and os.environ.get("SHARDMILL_RANK") == "1":
            time.sleep(0.1)
        return self.out(images_NCHW)


def late_on_rank_1(image_shape, num_classes):
    return LateOnRank1(image_shape, num_classes)


class _Farther(nn.Module):
    def forward(self, images_NCHW):
        return images_NCHW + 500.0


def late_statistics(image_shape, num_classes):
    """Its inputs are far from 0, and its moving statistics begin there and hardly move."""
    return nn.Sequential(_Farther(), nn.BatchNorm2d(image_shape[2], momentum=1e-5), linear(image_shape, num_classes))


def tiny_vit(image_shape, num_classes):
    """Attention with four heads, in two blocks; smooth, and with dropout that is drawn by sample."""
    return vit(image_shape, num_classes, dropout=0.1, width=32, num_blocks=2, num_heads=4)


def shallow_vit(image_shape, num_classes):
    """Of DeiT's smallest three blocks: in training its state takes more than its activations."""
    return vit(image_shape, num_classes, width=192, num_blocks=3, num_heads=3)
