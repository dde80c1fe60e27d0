"""PyTorch modules as users write them, right and wrong, for the tests of the torch backend; no Keras."""

from __future__ import annotations

import math
import os
import time
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from train.layers.torch import SampleDropout
from train.models.vit_torch import vit


def linear(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, num_classes))


class Ending(nn.Module):
    """Whose last layer is all of it, or all but what its classes add."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.out = linear(image_shape, num_classes)

    def forward(self, images_NCHW):
        return self.out(images_NCHW)


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
    """As in models_under_test.py."""
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


def smooth(image_shape, num_classes):
    """Without a kink and without anything that mixes samples: the same at every world size."""
    channels = image_shape[2]
    return nn.Sequential(nn.Conv2d(channels, 16, 3, stride=2, padding=1), nn.GELU(),
                         nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU(), nn.Flatten(), SampleDropout(0.2),
                         nn.Linear(32 * -(-image_shape[0] // 4) * -(-image_shape[1] // 4), num_classes))  # fmt: skip


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
    return nn.Sequential(nn.Conv2d(image_shape[2], 8, 3, stride=2), nn.BatchNorm2d(8, momentum=0.2), nn.ReLU(),
                         nn.Flatten(), nn.Dropout(0.5), nn.Linear(8 * ((image_shape[0] - 3) // 2 + 1) ** 2,
                                                                  num_classes))  # fmt: skip


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


def one_class_too_many(image_shape, num_classes):
    return linear(image_shape, num_classes + 1)


def frozen(image_shape, num_classes):
    return linear(image_shape, num_classes).requires_grad_(False)


class WithFeatures(Ending):
    def forward(self, images_NCHW):
        return {"logits": self.out(images_NCHW), "features": images_NCHW}


def no_model(image_shape, num_classes):
    return "a module"


class Steep(Ending):
    """Has far larger gradients than its outputs would give it, which float16 must hold."""

    def forward(self, images_NCHW):
        outputs_NK = self.out(images_NCHW).float()
        return outputs_NK + float(os.environ["SHARDMILL_TEST_STEEPNESS"]) * (outputs_NK - outputs_NK.detach())


class SoftmaxElsewhere(Ending):
    """Has a softmax, last in order, that training does not use."""

    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes)
        self.softmax = nn.Softmax(dim=1)


def with_softmax(image_shape, num_classes):
    return nn.Sequential(linear(image_shape, num_classes), nn.Softmax(dim=1))


class Branching(Ending):
    """Looks at a value of a tensor, which torch.export cannot follow."""

    def forward(self, images_NCHW):
        return self.out(images_NCHW) if images_NCHW.max() > -1e9 else self.out(-images_NCHW)


class LateOnRank1(Ending):
    """Rests in each step, on one rank of several."""

    def forward(self, images_NCHW):
        if self.training and os.environ.get("SHARDMILL_RANK") == "1":
            time.sleep(0.1)
        return self.out(images_NCHW)


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


class Fragile(Ending):
    """Answers for every image but the brightest ones, of which the pixels add up to more than `limit`."""

    limit = float("inf")

    def forward(self, images_NCHW):
        is_bright_N1 = images_NCHW.flatten(1).sum(dim=1, keepdim=True) > self.limit
        return self.out(images_NCHW / 255).masked_fill(is_bright_N1, float("nan"))


class Cliff(Ending):
    """Adds the root of a weight that is 0: nothing, at an infinite slope."""

    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes)
        self.height = nn.Parameter(torch.zeros(num_classes))

    def forward(self, images_NCHW):
        return self.out(images_NCHW) + self.height.sqrt()


class SteepWhereBright(nn.Module):
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


class Marked(Ending):
    """Answers, and beside them whether an image is brighter than a limit."""

    def forward(self, images_NCHW):
        is_bright_N1 = images_NCHW.flatten(1).sum(dim=1, keepdim=True) > float(os.environ["SHARDMILL_TEST_BRIGHTEST"])
        return torch.cat([self.out(images_NCHW / 255), is_bright_N1.float()], dim=1)


class Raised(nn.Module):
    """As the end of `SteepWhereBright`, for answers that are marked."""

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


class Blinded(Dazzled):
    """Likewise at all times."""

    always = True


class DropoutOfPatches(nn.Module):
    """Drops in more rows than the batch has samples."""

    def __init__(self):
        super().__init__()
        self.dropout = SampleDropout(0.5)

    def forward(self, images_NCHW):
        return self.dropout(images_NCHW.flatten(0, 2)).view(images_NCHW.shape)


def with_dropout_of_patches(image_shape, num_classes):
    return nn.Sequential(DropoutOfPatches(), linear(image_shape, num_classes))


class Hiding(Ending):
    """Keeps a module where PyTorch does not find it."""

    def __init__(self, image_shape, num_classes):
        super().__init__(image_shape, num_classes)
        self.hidden = [SampleDropout(0.5)]

    def forward(self, images_NCHW):
        return self.out(self.hidden[0](images_NCHW))


class Recomputing(nn.Module):
    """Computes activations again in the backward pass instead of keeping them."""

    def __init__(self, image_shape, num_classes):
        super().__init__()
        self.inner = smooth(image_shape, num_classes)

    def forward(self, images_NCHW):
        return checkpoint(self.inner, images_NCHW, use_reentrant=False)


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


class _Model(nn.Module):
    def __init__(self, image_shape, num_classes, last):
        super().__init__()
        self.out, self.last = nn.Linear(math.prod(image_shape), num_classes), last

    def forward(self, images_NCHW):
        return self.last(self.out(images_NCHW.flatten(1)))


def _behind(last, *more, nested=False, bias=None, std=None):
    """Factories of one layer and what follows it: outputs that are logits or probabilities, whatever comes last."""

    def build(image_shape, num_classes):
        model = _Model(image_shape, num_classes, last)
        if bias is not None:
            nn.init.zeros_(model.out.weight)
            nn.init.constant_(model.out.bias, bias(num_classes))
        if std is not None:
            nn.init.normal_(model.out.weight, std=std)
        inner = nn.Sequential(model, *(each() for each in more)) if more else model
        return nn.Sequential(inner, nn.Identity()) if nested else inner

    return build


def _softmax(values_NK):
    return functional.softmax(values_NK, dim=1)


nested_softmax = _behind(lambda x: x, lambda: nn.Softmax(dim=1), nested=True)
ops_softmax = _behind(_softmax)
softmax_of_zeros = _behind(_softmax, bias=lambda num_classes: 0.0)
softmax_then_identity = _behind(_softmax, lambda: nn.Dropout(0.0), nn.Identity)
own_softmax_layer = _behind(lambda x: (x - x.logsumexp(dim=1, keepdim=True)).exp())
nested_sigmoid = _behind(lambda x: x, nn.Sigmoid, nested=True)
ops_sigmoid = _behind(torch.sigmoid)
logits = _behind(lambda x: x)
zeros = _behind(lambda x: x, bias=lambda num_classes: 0.0)
constant_distribution = _behind(lambda x: x, bias=lambda num_classes: 1 / num_classes)
small_relu = _behind(functional.relu, std=1e-4)
log_softmax = _behind(lambda x: functional.log_softmax(x, dim=1))
tanh = _behind(torch.tanh)


class Peeking(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.flatten(1) / max(1.0, input.abs().max().item()))


def peeking(image_shape: tuple[int, int, int], num_classes: int) -> torch.nn.Module:
    return Peeking(image_shape[0] * image_shape[1] * image_shape[2], num_classes)
