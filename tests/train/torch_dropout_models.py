"""PyTorch modules that use `SampleDropout` as it cannot be used, and in ways that must change nothing."""

from __future__ import annotations

from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.train.torch_models import linear, smooth
from train.layers.torch import SampleDropout


class DropoutOfPatches(nn.Module):
    """Drops in more rows than the batch has samples."""

    def __init__(self):
        super().__init__()
        self.dropout = SampleDropout(0.5)

    def forward(self, images_NCHW):
        return self.dropout(images_NCHW.flatten(0, 2)).view(images_NCHW.shape)


def with_dropout_of_patches(image_shape, num_classes):
    return nn.Sequential(DropoutOfPatches(), linear(image_shape, num_classes))


class Hiding(nn.Module):
    """Keeps a module where PyTorch does not find it."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)
        self.hidden = [SampleDropout(0.5)]

    def forward(self, images_NCHW):
        return self.out(self.hidden[0](images_NCHW))


def hiding(image_shape, num_classes):
    return Hiding(image_shape, num_classes)


class Recomputing(nn.Module):
    """Computes activations again in the backward pass instead of keeping them."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.inner = smooth(image_shape, num_classes)

    def forward(self, images_NCHW):
        return checkpoint(self.inner, images_NCHW, use_reentrant=False)


def recomputing(image_shape, num_classes):
    return Recomputing(image_shape, num_classes)
