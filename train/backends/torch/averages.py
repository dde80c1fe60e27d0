"""Moving averages of a PyTorch model's weights (`train.ema_decay`), updated in place behind each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from train.backends.ema import ema_decay_after
from train.backends.torch.runtime import import_torch


class WeightAverages:
    """One average for each weight, in the weight's type. Before the first update it is the weight itself."""

    def __init__(self, weights: Sequence[Any], limit: float) -> None:
        torch = import_torch()
        self.weights = tuple(weights)
        self.averages = tuple(weight.detach().clone() for weight in self.weights)
        # Not on a GPU: each step asks for it.
        self.num_updates = torch.zeros((), dtype=torch.int64)
        self._limit = limit

    def update(self) -> None:
        """After an update of the weights."""
        share = 1 - ema_decay_after(int(self.num_updates), self._limit)
        self.num_updates += 1
        for average, weight in zip(self.averages, self.weights, strict=True):
            # A weight that is frozen keeps its bits.
            average.lerp_(weight.detach(), share)

    def begin(self) -> None:
        """Forget all: other weights were given."""
        self.num_updates.zero_()
        _copy(self.weights, self.averages)

    def give(self) -> None:
        """Let the weights be their averages."""
        _copy(self.averages, self.weights)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the model computes with the averages; behind it with its weights."""
        kept = [weight.detach().clone() for weight in self.weights]
        self.give()
        try:
            yield
        finally:
            _copy(kept, self.weights)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    with import_torch().no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
