"""What the epochs of a loader share: the shards that it has opened, memory to read and decode to, and the chunks with
which an epoch has ended; and the rows of the chunks in memory.

A split that fits into the shuffle windows is so read once, and verified then; of a larger one, each epoch begins with
what the last one has in memory. The rows in memory are one array a column, so that a step is gathered by index and not
row by row. Shape legend: N rows of a step, M rows of the chunks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardmill.augment.options import NO_CHANGES, AugmentOptions
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.epoch_plan import StepRows
from shardmill.errors import UsageError
from shardmill.formats.rows import ChunkRows, Scattered, slices_of
from shardmill.memory import ALIGNMENT, RecycledMemory, pageable
from shardmill.options import ENCODINGS
from shardmill.typed_columns import ANNOTATIONS, BOX_COLUMNS
from shardmill.values import Value

if TYPE_CHECKING:
    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.dataset.dataset import Dataset
    from shardmill.dataset.index import SplitIndex
    from shardmill.epoch_plan import PlanSpec
    from shardmill.formats.rows import RowSchema
    from shardmill.loader.selection import DatasetMix, MixFetcher, Selection

Chunks = dict[int, Future[ChunkRows]]
"""By number; those that are being read, too."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a reader's execution; they do not change its rows."""

    format: str = "auto"
    num_threads: int = 2
    prefetch_bytes: int = 64_000_000
    """Bound of the queue of decoded batches; one batch always fits."""
    caches: tuple[ChunkCache | None, ...] = (None,)
    """Of a remote dataset's chunks, on this host's disk; in a mix, one for each of its datasets."""
    allocate: Callable[[tuple[int, ...]], np.ndarray] = pageable
    """Gives the memory that batches are decoded into."""
    part_bytes: int = 4_000_000
    """Decoded bytes that are worth a thread of their own: a batch of several times as many is decoded by several."""
    copied_bytes: int = 12_000_000
    """The same of images that are stored as pixels: several small batches of them are made at once."""
    max_steps_together: int = 16
    """At most so many; more do not save more."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Which rows a reader reads, and what of them."""

    augment: AugmentOptions = NO_CHANGES
    columns: tuple[str, ...] | None = None
    """Of the extra columns; all by default."""
    selection: Selection | None = None
    """How often each row is used: the plan is then one of its entries. By default once each."""
    mix: DatasetMix | None = None
    """Several datasets, whose chunks the selection numbers; by default one."""


class RowSource:
    """Where the rows of all epochs of a group of streams come from. Readers use it one after the other, or at once."""

    def __init__(
        self, dataset: Dataset, spec: PlanSpec, streams: range, *, options: ReaderOptions, rows: RowOptions
    ) -> None:
        self.streams = streams
        self.options = options
        self.rows = rows
        self.normalize = dataset.manifest.normalize
        schema = dataset.manifest.row_schema
        wanted = _read_columns(schema, rows.columns, rows.augment)
        is_wanted = (column for column in schema.extra if column.name in wanted)
        self.schema = replace(schema, extra=tuple(is_wanted))
        self._chunk_memory = RecycledMemory(_num_chunk_arrays(len(streams), spec))
        self._fetcher: ChunkFetcher | MixFetcher
        self.rows_of_chunk: np.ndarray
        if rows.mix is None:
            index = dataset.index(spec.split, options.format)
            self._fetcher = ChunkFetcher(
                dataset.store, index, self.schema, options.caches[0], memory=self._chunk_memory
            )
            self.rows_of_chunk = index.chunk_rows
        else:
            self.schema = rows.mix.with_dataset_column(self.schema)
            self._fetcher = rows.mix.fetcher(self.schema, options.format, options.caches, self._chunk_memory)
            self.rows_of_chunk = self._fetcher.rows_of_chunk
        height, width, channels = rows.augment.shape_of(self.normalize.image_shape_HWC)
        self._batch_shape = (len(streams) * spec.rows_per_stream, height, width, channels)
        self._batch_bytes = int(np.prod(self._batch_shape))
        num_rows = self._batch_shape[0]
        self.num_parts = max(1, min(options.num_threads, num_rows, self._batch_bytes // options.part_bytes))
        """In which a batch is decoded, each by one thread."""
        self.steps_together = _steps_together(options, self._batch_bytes)
        """That one thread makes at a time. Of stored pixels only: what is decoded takes longer than to begin it."""
        if not ENCODINGS[self.normalize.encoding].is_fixed_size or self._batch_bytes % ALIGNMENT:
            self.steps_together = 1
        self.max_batches_ahead = _max_batches_ahead(options, self._batch_bytes)
        num_arrays = -(-_num_batches(options, self._batch_bytes) // self.steps_together)
        self._batch_memory = RecycledMemory(num_arrays, options.allocate)
        self._kept: Chunks = {}
        self._lock = threading.Lock()

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of a chunk. Raises IntegrityError and StorageError."""
        return self._fetcher.read_chunk(chunk)

    def take_batches(self, num_steps: int) -> np.ndarray:
        """Memory for the pixels of so many batches, NHWC, that nothing else refers to, with any content."""
        num_rows, *shape_HWC = self._batch_shape
        return self._batch_memory.take(num_steps * self._batch_bytes).reshape(num_steps * num_rows, *shape_HWC)

    def take_chunks(self) -> Chunks:
        """The chunks that the last reader left, for the next one."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return kept

    def keep_chunks(self, chunks: Chunks) -> None:
        """Those of the windows with which a reader ends; those that could not be read are read again."""
        with self._lock:
            self._kept = {
                number: future
                for number, future in chunks.items()
                if future.done() and not future.cancelled() and future.exception() is None
            }

    def clear(self) -> None:
        """Keep nothing in memory for a next epoch."""
        self.take_chunks()
        self._chunk_memory.clear()
        self._batch_memory.clear()


def kept_bytes(index: SplitIndex, spec: PlanSpec, num_streams: int, options: ReaderOptions, image_bytes: int) -> int:
    """The most that a source of so many streams keeps, within an epoch and between two: chunks, and decoded batches.

    Memory that is recycled grows to this and stays.
    """
    num_chunks = min(_num_chunk_arrays(num_streams, spec), index.num_chunks)
    batch_bytes = num_streams * spec.rows_per_stream * image_bytes
    chunk_bytes = min(num_chunks * int(index.stored_bytes.max(initial=0)), int(index.stored_bytes.sum()))
    return chunk_bytes + _num_batches(options, batch_bytes) * batch_bytes


def check_windows(index: SplitIndex, spec: PlanSpec, num_streams: int, usable_bytes: int) -> None:
    """Raise UsageError if the windows of so many streams do not fit into memory; 0 usable bytes: unknown.

    Of a plan that began on more ranks, each of which had fewer streams.
    """
    needed = min(num_streams * spec.window_chunks * index.max_chunk_bytes, int(index.image_bytes.sum()))
    if 0 < usable_bytes < needed:
        raise UsageError(
            f"shuffle windows of {spec.window_chunks} chunks, with which this order began, need {needed} bytes on a "
            f"rank with {num_streams} of {spec.num_streams} streams",
            f"expected at most the {usable_bytes} bytes that are free here",
            "continue on more ranks, or begin a new order",
        )


def _read_columns(schema: RowSchema, columns: tuple[str, ...] | None, augment: AugmentOptions) -> tuple[str, ...]:
    """Names of the extra columns to read: boxes with their classes, and nothing that could not be moved."""
    wanted = {column.name for column in schema.extra} if columns is None else set(columns)
    if schema.has_annotations and augment.unfollowed:
        wanted.difference_update(ANNOTATIONS)
    if schema.has_boxes and not BOX_COLUMNS.keys().isdisjoint(wanted):
        wanted.update(BOX_COLUMNS)
    return tuple(wanted)


def _num_chunk_arrays(num_streams: int, spec: PlanSpec) -> int:
    """A window's chunks, and those of the next one, which are read before the last step of it is decoded."""
    return 2 * num_streams * spec.window_chunks


def _max_batches_ahead(options: ReaderOptions, batch_bytes: int) -> int:
    return max(1, options.prefetch_bytes // max(1, batch_bytes))


def _steps_together(options: ReaderOptions, batch_bytes: int) -> int:
    """As many as are worth a thread."""
    worth = min(options.copied_bytes // max(1, batch_bytes), options.max_steps_together)
    return max(1, min(worth, _max_batches_ahead(options, batch_bytes)))


def _num_batches(options: ReaderOptions, batch_bytes: int) -> int:
    """Those in the queue and in the threads, the consumer's and the one before it."""
    at_once = (options.num_threads + 2) * _steps_together(options, batch_bytes)
    return _max_batches_ahead(options, batch_bytes) + at_once


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
