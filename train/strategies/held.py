"""What a rank holds of a PyTorch module: each strategy declares it (`SharedModel.held`), weight by weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config import TrainConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """Of the rank that holds most."""

    weights: Mapping[str, Shape]
    """By the name of a trainable weight: the shape of what the rank keeps of it, and has gradients of. One of which
    it keeps nothing is left out."""
    updated: Mapping[str, Shape]
    """Likewise: the part whose optimizer state it has."""
    module: Any
    """What its forward pass computes with; of its tensors only the shapes exist."""
    gathered_bytes: int = 0
    """What it has of other ranks' elements during the forward and the backward pass."""
    update_bytes: int = 0
    """What it needs behind the backward pass, to exchange gradients or updated weights; activations are gone by then.
    """
    activation_share: float = 1.0
    """Of the activations of `module`, the part that it has at a time."""


def holds_all(config: TrainConfig, module: Any) -> Held:
    """Of ranks that have the whole model each."""
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters() if each.requires_grad}
    return Held(shapes, shapes, module)


def num_bytes(shapes: Iterable[Shape]) -> int:
    """Of float32, which weights are."""
    return 4 * sum(map(math.prod, shapes))
