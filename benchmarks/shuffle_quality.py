"""How far the epochs of a plan are from a uniform permutation, by the size of the window, if rows are sorted by class.

python benchmarks/shuffle_quality.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from shardmill.epoch_plan import PlanSpec, plan_epoch
from shardmill.loader.reader import StepPlanner

_BATCH, _STREAMS, _EPOCHS = 256, 8, 3
_WINDOWS = (1, 2, 4, 8, 16, 1_000_000)


@dataclass(frozen=True, slots=True)
class Case:
    """A dataset whose classes are one behind the other."""

    name: str
    num_rows: int
    num_classes: int
    rows_of_chunk: int


_CASES = (
    Case("photographs of 100 kB", 128_000, 1_000, 40),
    Case("photographs of 100 kB, few classes", 128_000, 10, 40),
    Case("32 x 32 raw", 50_000, 10, 1_300),
)


def main() -> None:
    """Print the table."""
    print("| dataset | window, chunks | classes a batch | distance | excess | pairs of one chunk, times uniform |")
    print("|---|---|---|---|---|---|")
    for case in _CASES:
        labels = np.arange(case.num_rows) * case.num_classes // case.num_rows
        rng = np.random.default_rng(0)
        uniform = _measured(case, labels, [rng.permutation(case.num_rows) for _ in range(_EPOCHS)])
        for window in _WINDOWS:
            classes, distance, pairs = _measured(case, labels, [_order(case, window, each) for each in range(_EPOCHS)])
            size = "all of a stream" if window == _WINDOWS[-1] else str(window)
            excess = f"{100 * (distance / uniform[1] - 1):+.1f} %"
            print(f"| {case.name} | {size} | {classes:.1f} | {distance:.3f} | {excess} | {pairs / uniform[2]:.1f} |")
        print(f"| {case.name} | uniform permutation | {uniform[0]:.1f} | {uniform[1]:.3f} | | 1.0 |", flush=True)


def _order(case: Case, window: int, epoch: int) -> np.ndarray:
    """Row numbers in the order of the epoch's steps, padding left out."""
    chunk_rows = np.diff(np.append(np.arange(0, case.num_rows, case.rows_of_chunk), case.num_rows))
    plan = plan_epoch(PlanSpec("layout", "train", 0, _BATCH, _STREAMS, window), chunk_rows, epoch)
    planner = StepPlanner(plan, range(_STREAMS))
    steps = [planner.rows_of_step(step) for step in range(plan.num_steps)]
    rows = [(step.chunks_N * case.rows_of_chunk + step.rows_N)[step.weights_N > 0] for step in steps]
    return np.concatenate(rows)


def _measured(case: Case, labels: np.ndarray, orders: list[np.ndarray]) -> tuple[float, float, float]:
    """Means over the full batches: distinct classes, total variation distance of a batch's classes from the dataset's,
    and the share of pairs of rows that are of one chunk.
    """
    classes, distances, pairs = [], [], []
    for order in orders:
        for first in range(0, len(order) - _BATCH + 1, _BATCH):
            rows = order[first : first + _BATCH]
            shares = np.bincount(labels[rows], minlength=case.num_classes) / _BATCH
            classes.append(np.count_nonzero(shares))
            distances.append(np.abs(shares - 1 / case.num_classes).sum() / 2)
            counts = np.bincount(rows // case.rows_of_chunk)
            pairs.append((counts * (counts - 1)).sum() / (_BATCH * (_BATCH - 1)))
    return float(np.mean(classes)), float(np.mean(distances)), float(np.mean(pairs))


if __name__ == "__main__":
    sys.exit(main())
