"""How often each row of a split is used in an epoch, as entries of an epoch plan; integers in, integers out.

An entry is one use of a row. The entries of a chunk take the place of its rows in the plan, so that every property of
plans holds for them: each entry exactly once an epoch, at any world size, resumed at any step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from shardmill.epoch_plan import StepRows


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The entries of a split, in stored order. The plan numbers the chunks that have any."""

    chunks: np.ndarray
    """The split's number of each of these chunks; the same one several times if `select_apart` has made it."""
    starts: np.ndarray
    """The first entry of each of them, and the number of entries at the end."""
    entry_rows: np.ndarray
    """The row of each entry within its chunk."""
    entry_occurrences: np.ndarray
    """0 for the first use of a row, 1 for the second."""
    num_distinct: int
    digest: str

    @property
    def num_rows(self) -> int:
        """Rows that an epoch has, a repeated one as often as it is used."""
        return int(self.starts[-1])

    @property
    def chunk_rows(self) -> np.ndarray:
        """What the plan takes as the rows of each chunk."""
        return np.diff(self.starts)

    def rows_of(self, planned: StepRows) -> StepRows:
        """The rows of the split that a step of the plan means."""
        entries_N = self.starts[planned.chunks_N] + planned.rows_N
        return StepRows(self.chunks[planned.chunks_N], self.entry_rows[entries_N], planned.weights_N)

    def occurrences_of(self, planned: StepRows) -> np.ndarray:
        """Which use of its row each row of a step is."""
        return self.entry_occurrences[self.starts[planned.chunks_N] + planned.rows_N]

    def chunks_of(self, planned: set[int]) -> set[int]:
        """The split's numbers of chunks of the plan."""
        return {int(self.chunks[chunk]) for chunk in planned}


def select(repeats_N: np.ndarray, chunk_rows: np.ndarray) -> Selection | None:
    """The selection that uses row n of the split `repeats_N[n]` times; None if that is once each."""
    if (repeats_N == 1).all():
        return None
    stops = np.cumsum(chunk_rows)
    before = np.concatenate([[0], np.cumsum(repeats_N, dtype=np.int64)])
    entries_of_chunk = before[stops] - before[stops - chunk_rows]
    chunks = np.flatnonzero(entries_of_chunk)
    rows = np.repeat(np.arange(len(repeats_N)), repeats_N)
    chunk_starts = np.repeat(stops - chunk_rows, entries_of_chunk)
    return Selection(
        chunks=chunks,
        starts=np.concatenate([[0], np.cumsum(entries_of_chunk[chunks], dtype=np.int64)]),
        entry_rows=(rows - chunk_starts).astype(np.int32),
        entry_occurrences=(np.arange(len(rows)) - before[rows]).astype(np.int32),
        num_distinct=int((repeats_N > 0).sum()),
        digest=_digest(repeats_N),
    )


def select_apart(repeats_N: np.ndarray, chunk_rows: np.ndarray) -> Selection:
    """As `select`, but a chunk has one place in the plan for each use of its rows, so that the uses of a row are spread
    over the epoch as different chunks are.
    """
    rows = np.repeat(np.arange(len(repeats_N)), repeats_N)
    before = np.concatenate([[0], np.cumsum(repeats_N, dtype=np.int64)])
    occurrences = np.arange(len(rows)) - before[rows]
    # First uses in stored order, then second ones.
    order = np.argsort(occurrences, kind="stable")
    rows, occurrences = rows[order], occurrences[order]
    chunk_of_entry = np.repeat(np.arange(len(chunk_rows)), chunk_rows)[rows]
    begins = np.flatnonzero((np.diff(chunk_of_entry, prepend=-1) != 0) | (np.diff(occurrences, prepend=-1) != 0))
    return Selection(
        chunks=chunk_of_entry[begins],
        starts=np.append(begins, len(rows)),
        entry_rows=(rows - (np.cumsum(chunk_rows) - chunk_rows)[chunk_of_entry]).astype(np.int32),
        entry_occurrences=occurrences.astype(np.int32),
        num_distinct=int((repeats_N > 0).sum()),
        digest=_digest(repeats_N),
    )


def _digest(repeats_N: np.ndarray) -> str:
    return hashlib.sha256(repeats_N.astype("<i4").tobytes()).hexdigest()
