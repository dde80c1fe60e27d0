"""What `resume_conformance.py` counts: rows lost, repeated and out of order, and steps that ranks do not share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

Run = Sequence[Sequence[Sequence[int]]]
"""Rank -> step -> numbers of rows: what the ranks of one run read of one epoch."""
Epoch = Sequence[Run]
"""The runs that read one epoch after each other: one, and one more for each time that it was interrupted."""


@dataclass(frozen=True)
class Counts:
    """Sums over all epochs."""

    lost: int
    repeated: int
    out_of_order: int
    unequal: int

    def __str__(self) -> str:
        return f"{self.lost} / {self.repeated} / {self.out_of_order} / {self.unequal}"


def count(epochs: Sequence[Epoch], expected: Sequence[Epoch]) -> Counts:
    """How an interrupted training differs from an uninterrupted one: uses of a row in an epoch that it lacks, uses that
    it has too many, rows that come at another step, and steps that some ranks of a run have and others have not."""
    lost = repeated = out_of_order = 0
    for got, wanted in zip(map(_steps, epochs), map(_steps, expected), strict=True):
        uses, due = Counter(chain(*got)), Counter(chain(*wanted))
        lost += (due - uses).total()
        repeated += (uses - due).total()
        # Uses that both have in the same step; what both have besides is out of order.
        shared = sum((Counter(a) & Counter(b)).total() for a, b in zip(got, wanted, strict=False))
        out_of_order += (uses & due).total() - shared
    return Counts(lost, repeated, out_of_order, sum(_unequal(run) for epoch in epochs for run in epoch))


def count_uninterrupted(epochs: Sequence[Epoch], num_rows: int) -> Counts:
    """The same for a training without an interruption, beside an epoch with each row once."""
    return count(epochs, [[[[[row] for row in range(num_rows)]]]] * len(epochs))


def _steps(epoch: Epoch) -> list[list[int]]:
    """The global batches of an epoch, each rank's rows after those of the ranks before."""
    return [list(chain(*step)) for run in epoch for step in zip_longest(*run, fillvalue=())]


def _unequal(run: Run) -> int:
    lengths = [len(steps) for steps in run]
    return max(lengths) - min(lengths)
