"""What a rank holds of a PyTorch module: each strategy declares it (`Strategy.held`), as boxes of named weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.backends.torch.layout import Box
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Held:
    """Of the rank that holds most."""

    weights: Mapping[str, Box]
    """By the name of a trainable weight: the elements that the rank keeps, and has gradients of."""
    updated: Mapping[str, Box]
    """Likewise: the elements whose optimizer state it has."""
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
    """`Strategy.held` of ranks that have the whole model each."""
    from train.backends.torch.layout import whole_box

    boxes = {name: whole_box(tuple(each.shape)) for name, each in module.named_parameters() if each.requires_grad}
    return Held(boxes, boxes, module)
