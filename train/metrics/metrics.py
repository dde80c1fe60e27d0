"""The interface of metrics: sums that a rank accumulates over a split, and the figures of all ranks' sums."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.contracts.values import Evaluation


class Exchange(Protocol):
    """The collective operations that metrics need; implemented by a `Member`, and by a world of one."""

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """The sum over all ranks, in the array's own type."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; not all of them may be empty."""
        ...


class Metrics(Protocol):
    """The part of one rank."""

    def add(self, scores_NK: np.ndarray, batch: Batch, /) -> None:
        """Count a batch, by the scores of `train.evaluation.evaluate`; rows of weight 0 are left out."""
        ...

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        """The figures over all ranks, equal on all of them; all call it. Raises TrainingError for a loss of NaN."""
        ...


def check_finite(loss: float, split: str) -> None:
    """Raises TrainingError if a loss is not a number."""
    if not np.isfinite(loss):
        raise TrainingError(
            f"the evaluation on {split!r} gave a loss of {loss}", "expected finite outputs", "lower train.learning_rate"
        )
