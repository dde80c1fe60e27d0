"""The shape of a mesh of ranks: one axis for each kind of parallelism, and where a rank lies. No other module knows
in which order ranks lie along the axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

AXES = ("pipeline", "data", "fsdp", "tensor")
"""From the outermost to the innermost: neighbouring ranks are of one tensor group."""
AXES_OF_LAYERS = ("pipeline", "tensor")
"""Along these, ranks compute different layers, or parts of them, of the same rows."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Numbers of ranks along the axes, which are its fields in the order of `AXES`."""

    pipeline: int = 1
    """Stages of the model, each on a rank of its own."""
    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Ranks that share the weights of a copy, and read rows of their own (arXiv:1910.02054, stage 3)."""
    tensor: int = 1
    """Ranks that share each layer (arXiv:1909.08053)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, from the outermost to the innermost."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, that read rows of their own."""
        return self.data * self.fsdp

    @property
    def num_dividing(self) -> int:
        """Number of ranks that compute with the same rows."""
        return math.prod(self.sizes[axis] for axis in AXES_OF_LAYERS)

    def stride(self, axis: str) -> int:
        """How far apart two neighbours along that axis are: the ranks along all axes inside it."""
        return math.prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :])

    def place(self, rank: int) -> dict[str, int]:
        """Axis -> the index of a rank along it."""
        return {axis: rank // self.stride(axis) % size for axis, size in self.sizes.items()}


def axes_in_words(sizes: Mapping[str, int]) -> str:
    """`fsdp 4 x tensor 2`: the axes with several ranks, from the outermost to the innermost."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data 1"
