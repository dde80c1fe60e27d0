"""The vision transformer of train/models/vit.py as a PyTorch module, and the family of arXiv:2010.11929 by size.

Strategies that divide a model among ranks need a module: `blocks` is a chain, in which each block takes and returns a
contiguous tensor of its own, so that stages can end between any two; and a block's linear layers are separate, so that
query, key, value and fc1 can be divided by columns (heads), out and fc2 by rows.

Shape legend: N batch, H height, W width, C channels, P patches, E width of a token, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardmill.errors import UsageError
from train.layers.torch import SampleDropout
from train.models.first_values import begin_torch

FEWEST_PATCHES_PER_SIDE = 8


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers that make one model of the family; a factory takes each of them by name."""

    width: int = 128
    num_blocks: int = 4
    num_heads: int = 4
    mlp_ratio: int = 2
    """Width of the hidden layer of a block, divided by `width`."""
    patch_size: int = 0
    """Side of a patch in pixels; 0: chosen by the size of the images."""
    largest_patch: int = 0
    """A patch that is chosen has this side, or a half, a quarter, ... of it: the largest of which at least 8 fit into
    the shorter side. 0: an eighth of the shorter side, rounded, as in train/models/vit.py."""

    def patch_of(self, height: int, width: int) -> int:
        shorter = min(height, width)
        if self.patch_size or not self.largest_patch:
            return self.patch_size or max(1, round(shorter / FEWEST_PATCHES_PER_SIDE))
        side = self.largest_patch
        while side > 1 and shorter // side < FEWEST_PATCHES_PER_SIDE:
            side //= 2
        return side


SMALL = Size()
TINY_16 = Size(width=192, num_blocks=12, num_heads=3, mlp_ratio=4, largest_patch=16)
SMALL_16 = replace(TINY_16, width=384, num_heads=6)
BASE_16 = replace(TINY_16, width=768, num_heads=12)
LARGE_16 = replace(TINY_16, width=1024, num_blocks=24, num_heads=16)
HUGE_14 = replace(TINY_16, width=1280, num_blocks=32, num_heads=16, largest_patch=14)


class PatchEmbedding(nn.Linear):
    """images_NCHW, padded to whole patches -> tokens_NPE."""

    def __init__(self, image_shape_HWC: tuple[int, int, int], patch_size: int, width: int) -> None:
        height, image_width, num_channels = image_shape_HWC
        super().__init__(patch_size * patch_size * num_channels, width, bias=False)
        self.patch_size = patch_size
        self.rows, self.columns = -(-height // patch_size), -(-image_width // patch_size)
        self.padding = (0, self.columns * patch_size - image_width, 0, self.rows * patch_size - height)
        # A bias of its own for each place is the position embedding.
        self.position_bias = nn.Parameter(torch.empty(self.rows * self.columns, width))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input`: images_NCHW, by the name that nn.Linear gives it."""
        images_NCHW = input
        if any(self.padding):
            images_NCHW = nn.functional.pad(images_NCHW, self.padding)
        sides = images_NCHW.unflatten(3, (self.columns, self.patch_size)).unflatten(2, (self.rows, self.patch_size))
        # Pixels of a patch in the order of the Keras model: by row, column, channel.
        patches = sides.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
        return super().forward(patches) + self.position_bias


class Attention(nn.Module):
    """Self-attention. Its number of heads follows from the width of what its layers return, so that a rank may hold
    some of the heads.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        """Of the whole model."""
        self.head_width = width // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, tokens_NPE: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._by_head(layer(tokens_NPE)) for layer in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _by_head(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.unflatten(2, (-1, self.head_width)).transpose(1, 2)


class Block(nn.Module):
    """Attention, then two dense layers; each is added to what it is computed from."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        width, hidden = size.width, size.mlp_ratio * size.width
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, size.num_heads)
        self.dropout1 = _dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout2 = _dropout(dropout)

    def forward(self, tokens_NPE: torch.Tensor) -> torch.Tensor:
        tokens_NPE = tokens_NPE + self.dropout1(self.attention(self.norm1(tokens_NPE)))
        hidden = nn.functional.gelu(self.fc1(self.norm2(tokens_NPE)))
        return tokens_NPE + self.dropout2(self.fc2(hidden))


class MeanOfTokens(nn.Module):
    """tokens_NPE -> their mean_NE."""

    def forward(self, tokens_NPE: torch.Tensor) -> torch.Tensor:
        return tokens_NPE.mean(1)


class VisionTransformer(nn.Module):
    """images_NCHW of one size -> logits_NK, from the mean of the tokens behind the last block.

    Raises UsageError for a width that the heads do not divide.
    """

    def __init__(
        self,
        image_shape_HWC: tuple[int, int, int],
        num_classes: int,
        size: Size,
        dropout: float = 0.0,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        if size.width % size.num_heads:
            raise UsageError(
                f"a vision transformer of width {size.width} with {size.num_heads} heads",
                "expected heads that divide the width",
                f"set num_heads to a divisor of {size.width}",
            )
        self.size = size
        patch_size = size.patch_of(*image_shape_HWC[:2])
        self.embedding = PatchEmbedding(image_shape_HWC, patch_size, size.width)
        self.dropout = _dropout(dropout)
        self.blocks = nn.Sequential(*(Block(size, dropout) for _ in range(size.num_blocks)))
        self.norm = nn.LayerNorm(size.width, eps=1e-6)
        self.head = nn.Linear(size.width, num_classes)
        begin_torch(self, seed)

    def forward(self, images_NCHW: torch.Tensor) -> torch.Tensor:
        tokens_NPE = self.blocks(self.dropout(self.embedding(images_NCHW)))
        return self.head(self.norm(tokens_NPE).mean(1))

    def stages(self) -> list[nn.Module]:
        """What `forward` computes in a row: a pipeline may cut it between any two (train/backends/torch/chain.py)."""
        return [self.embedding, self.dropout, *self.blocks, self.norm, MeanOfTokens(), self.head]


def _dropout(rate: float) -> nn.Module:
    return SampleDropout(rate) if rate else nn.Identity()


def _factory(size: Size) -> Callable[..., VisionTransformer]:
    """The factory of one size, which takes each field of `Size` by name."""

    def build(
        image_shape: tuple[int, int, int],
        num_classes: int,
        dropout: float = 0.0,
        *,
        seed: int | None = None,
        **other: int,
    ) -> VisionTransformer:
        return VisionTransformer(image_shape, num_classes, replace(size, **other), dropout, seed)

    return build


vit = _factory(SMALL)
"""The model of train/models/vit.py: same parameters, same function, same first values."""
# The first two are DeiT's (arXiv:2012.12877), the others those of arXiv:2010.11929.
vit_tiny, vit_small = _factory(TINY_16), _factory(SMALL_16)
vit_base, vit_large, vit_huge = _factory(BASE_16), _factory(LARGE_16), _factory(HUGE_14)
