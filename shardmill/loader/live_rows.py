"""The rows of the chunks in memory as one array a column, so that a step is gathered by index and not row by row.

Shape legend: N rows of a step, M rows of the chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from shardmill.epoch_plan import StepRows
from shardmill.formats.rows import ChunkRows, Scattered, slices_of
from shardmill.values import Value


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """The rows of one step, still encoded."""

    images: Scattered
    labels_N: np.ndarray
    """As in `ChunkRows`."""
    sample_ids_N: np.ndarray
    chunks: tuple[ChunkRows | None, ...]
    """None: without a row of the step."""
    places_N: np.ndarray
    """Which of `chunks` each row is of."""
    rows_N: np.ndarray
    """Row within its chunk."""

    def part(self, rows: slice) -> GatheredRows:
        """Some consecutive ones of them."""
        return replace(
            self,
            images=self.images[rows],
            labels_N=self.labels_N[rows],
            sample_ids_N=self.sample_ids_N[rows],
            places_N=self.places_N[rows],
            rows_N=self.rows_N[rows],
        )

    def sources(self) -> list[str]:
        """The source of each row."""
        return [str(chunk.sources[row]) for chunk, row in self._chunks_and_rows()]

    def extra(self, name: str) -> list[Value]:
        """The values of an extra column."""
        return [chunk.extra[name][row] for chunk, row in self._chunks_and_rows()]

    def _chunks_and_rows(self) -> Sequence[tuple[ChunkRows, int]]:
        places = zip(self.places_N.tolist(), self.rows_N.tolist(), strict=True)
        return [(chunk, row) for place, row in places if (chunk := self.chunks[place]) is not None]


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the rows of a batch come from, padding included."""

    occurrences_N: np.ndarray
    """Which use of its row in the epoch each is, from 0."""
    sources: Callable[[], list[str]]
    """The source of each row."""


class LiveRows:
    """The rows of a fixed set of chunks, each of which is added when a step first needs it. Safe for several threads.

    A step keeps the instance that was current when it was planned, and with it the bytes of its chunks.
    """

    def __init__(self, chunks: Collection[int], rows_of_chunk: np.ndarray) -> None:
        self.chunks = frozenset(chunks)
        # Sets and a dict, and no arrays of NumPy: `searchsorted` lets go of the interpreter's lock, and then a step of
        # small images waits for it longer than it would for all of these.
        self._slots = {chunk: slot for slot, chunk in enumerate(sorted(chunks))}
        self._there: set[int] = set()
        rows_of_slot = rows_of_chunk[np.array(list(self._slots), dtype=np.int64)]
        self._starts = np.cumsum(np.concatenate([[0], rows_of_slot]), dtype=np.int64)
        self._rows: list[ChunkRows | None] = [None] * len(self._slots)
        self._data = [memoryview(b"")] * len(self._slots)
        num_rows = int(self._starts[-1])
        self._labels_M: np.ndarray | None = None
        self._sample_ids_M, self._begins_M, self._ends_M = (np.empty(num_rows, dtype=np.int64) for _ in range(3))
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether steps have needed all of them."""
        return len(self._there) == len(self._slots)

    def has_all(self, chunks_N: np.ndarray) -> bool:
        """Whether each of these chunks is one of the set that a step has needed."""
        return self._there.issuperset(chunks_N.tolist())

    def missing(self, chunks: Collection[int]) -> list[int]:
        """Those that no step has needed yet."""
        return sorted(set(chunks) - self._there)

    def gather(self, step: StepRows, futures: Mapping[int, Future[ChunkRows]]) -> GatheredRows:
        """The rows of a step; the futures read those of its chunks that are missing, and are done."""
        chunks = step.chunks_N.tolist()
        if not self.is_complete:
            for chunk in self.missing(chunks):
                self._add(chunk, futures[chunk].result())
        slots_N = np.fromiter(map(self._slots.__getitem__, chunks), np.int64, len(chunks))
        index_N = self._starts[slots_N] + step.rows_N
        assert self._labels_M is not None
        return GatheredRows(
            images=Scattered(tuple(self._data), slots_N, self._begins_M[index_N], self._ends_M[index_N]),
            labels_N=self._labels_M[index_N],
            sample_ids_N=self._sample_ids_M[index_N],
            chunks=tuple(self._rows),
            places_N=slots_N,
            rows_N=step.rows_N,
        )

    def _add(self, chunk: int, rows: ChunkRows) -> None:
        with self._lock:
            slot = self._slots[chunk]
            place = slice(self._starts[slot], self._starts[slot + 1])
            if self._labels_M is None:
                shape = (int(self._starts[-1]), *rows.labels_N.shape[1:])
                self._labels_M = np.empty(shape, dtype=rows.labels_N.dtype)
            self._labels_M[place] = rows.labels_N
            self._sample_ids_M[place] = rows.sample_ids_N
            images = slices_of(rows.images)
            self._begins_M[place], self._ends_M[place] = images.starts_N, images.stops_N
            self._rows[slot], self._data[slot] = rows, images.data
            # Last: who sees it reads the row's columns without the lock.
            self._there.add(chunk)
