"""Reads the planned rows of an epoch as batches, in planned order for any timing of the reader threads.

The consuming thread plans; reader threads fetch, verify, decode and augment. Finished batches wait in a queue that is
bounded in bytes, and a fault in any thread is raised in place of its batch. Shape legend: N batch, H height, W width,
C channels.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from shardmill.augment.batch import change_batch
from shardmill.augment.draws import Draws
from shardmill.augment.options import NO_CHANGES, AugmentOptions
from shardmill.augment.windows import draw_windows
from shardmill.dataset.dataset import Dataset
from shardmill.epoch_plan import EpochPlan, StepRows
from shardmill.errors import UsageError
from shardmill.formats.rows import ChunkRows
from shardmill.loader.decode import decode_batch, decode_distinct
from shardmill.loader.live_rows import GatheredRows, LiveRows, Origins
from shardmill.loader.row_source import Chunks, ReaderOptions, RowOptions, RowSource
from shardmill.step_planner import StepPlanner
from shardmill.typed_columns import label_shape
from shardmill.values import Batch, Value

Item = TypeVar("Item")
Finish = Callable[[Batch, Origins], Item]
"""What a reader's thread makes of a batch; it may ask where each row comes from."""


@dataclass(frozen=True, slots=True)
class ReaderSeconds:
    """Working time of a reader's threads, summed; two threads work up to two seconds in one."""

    fetch: float = 0.0
    """Reading chunks from storage and verifying them."""
    decode: float = 0.0
    """Decoding and changing images."""

    def __add__(self, more: ReaderSeconds) -> ReaderSeconds:
        return ReaderSeconds(self.fetch + more.fetch, self.decode + more.decode)


class OneProcess:
    """Remembers the process that used a reader first: a fork has a copy of everything but its threads."""

    def __init__(self) -> None:
        self._pid = 0

    @property
    def is_another(self) -> bool:
        """Whether this process is a fork of the one that began; threads that it does not have may hold its locks."""
        return self._pid not in (0, os.getpid())

    def check(self) -> None:
        """Raises UsageError in a fork of the process that called it first; there, waiting for a thread has no end."""
        self._pid = self._pid or os.getpid()
        if self.is_another:
            raise UsageError(
                f"this loader was started in process {self._pid}, but process {os.getpid()} is a fork of it",
                "expected the process that started it, because its threads do not exist in another one",
                "start the other processes first, and open the dataset and make its loader in each of them",
            )


class BatchReader(Generic[Item]):
    """One epoch's batches for a group of streams, in order. Use it as a context manager: closing joins its threads."""

    def __init__(self, source: RowSource, plan: EpochPlan, *, first_step: int, finish: Finish[Item]) -> None:
        self._source = source
        self._plan = plan
        self._first_step = first_step
        self._finish = finish
        self._planner = StepPlanner(plan, source.streams)
        num_threads = source.options.num_threads
        # Decoding waits for fetching: in one pool, waiting decoders could take every thread that a fetch needs.
        self._fetch_pool = ThreadPoolExecutor(num_threads, "shardmill-fetch")
        self._decode_pool = ThreadPoolExecutor(num_threads, "shardmill-decode")
        self._chunks = source.take_chunks()
        self._live = LiveRows((), source.rows_of_chunk)
        self._num_windows = -1
        """What the planner had begun when `_live` was made; -1 if that has more than the windows' chunks."""
        self._lock = threading.Lock()
        self._seconds = ReaderSeconds()
        self._process = OneProcess()

    def __iter__(self) -> Iterator[Item]:
        waiting: collections.deque[Future[Item]] = collections.deque()
        try:
            for step in range(self._first_step, self._plan.num_steps):
                waiting.append(self.submit(step))
                # A finished batch does not wait for the queue to fill.
                while waiting and (len(waiting) > self._source.max_batches_ahead or waiting[0].done()):
                    yield waiting.popleft().result()
                    self._process.check()
            while waiting:
                yield waiting.popleft().result()
                self._process.check()
        finally:
            if not self._process.is_another:
                for future in waiting:
                    future.cancel()

    def __enter__(self) -> BatchReader[Item]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def take_seconds(self) -> ReaderSeconds:
        """Return the working time of the threads since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, ReaderSeconds()
        return taken

    def close(self) -> None:
        """Stop and join every reader thread; in a fork there are none."""
        if self._process.is_another:
            return
        self._decode_pool.shutdown(wait=True, cancel_futures=True)
        self._fetch_pool.shutdown(wait=True, cancel_futures=True)
        chunks, self._chunks = self._chunks, {}
        self._live = LiveRows((), self._source.rows_of_chunk)
        if chunks:
            self._source.keep_chunks(chunks)

    def submit(self, step: int) -> Future[Item]:
        """Begin to read one step, whichever it is; not from several threads at once. Iterating does it in order.

        Raises UsageError in a fork of the process that began.
        """
        self._process.check()
        rows, selection = self._planner.rows_of_step(step), self._source.rows.selection
        occurrences_N = np.zeros_like(rows.rows_N)
        if selection is not None:
            occurrences_N, rows = selection.occurrences_of(rows), selection.rows_of(rows)
        futures = self._futures_of(rows.chunks_N)
        return self._decode_pool.submit(self._decode, step, rows, occurrences_N, self._live, futures)

    def _futures_of(self, chunks_N: np.ndarray) -> Chunks:
        """Begin to read the chunks of a step that are not in memory. -> those that no earlier step has needed."""
        planner, selection = self._planner, self._source.rows.selection
        if planner.num_windows == self._num_windows and (self._live.is_complete or self._live.has_all(chunks_N)):
            return {}
        live, needed = planner.live_chunks(), set(np.unique(chunks_N).tolist())
        live = live if selection is None else selection.chunks_of(live)
        # A step that ends a window still needs its chunks, and the next one does not.
        self._num_windows = planner.num_windows if needed <= live else -1
        if self._live.chunks != live | needed:
            # Only the chunks of the current windows. A step in flight holds its own references, so dropping a chunk
            # here frees its memory only after the last step that needs it.
            self._live = LiveRows(live | needed, self._source.rows_of_chunk)
            self._chunks = {chunk: future for chunk, future in self._chunks.items() if chunk in self._live.chunks}
        for chunk in sorted(needed.difference(self._chunks)):
            self._chunks[chunk] = self._fetch_pool.submit(self._fetch, chunk)
        return {chunk: self._chunks[chunk] for chunk in self._live.missing(needed)}

    def _fetch(self, chunk: int) -> ChunkRows:
        started = time.perf_counter()
        rows = self._source.read_chunk(chunk)
        self._count(ReaderSeconds(fetch=time.perf_counter() - started))
        return rows

    def _decode(self, step: int, rows: StepRows, occurrences_N: np.ndarray, live: LiveRows, futures: Chunks) -> Item:
        for future in futures.values():
            future.result()
        started = time.perf_counter()
        gathered = live.gather(rows, futures)
        batch = self._batch(step, rows, occurrences_N, gathered)
        finished = self._finish(batch, Origins(occurrences_N, gathered.sources))
        self._count(ReaderSeconds(decode=time.perf_counter() - started))
        return finished

    def _count(self, more: ReaderSeconds) -> None:
        with self._lock:
            self._seconds += more

    def _batch(self, step: int, rows: StepRows, occurrences_N: np.ndarray, gathered: GatheredRows) -> Batch:
        spec, augment, normalize = self._plan.spec, self._source.rows.augment, self._source.normalize
        draws = Draws(spec.seed, self._plan.epoch, gathered.sample_ids_N, occurrences_N)
        images_NHWC, is_real_N = self._source.take_batch(), rows.weights_N > 0
        windows = draw_windows(draws, augment, normalize.image_shape_HWC[:2])
        labels_N, sample_ids_N, is_full = gathered.labels_N, gathered.sample_ids_N, bool(is_real_N.all())
        if is_full:
            decode_batch(gathered.images, normalize, windows, images_NHWC)
        else:
            keys = np.stack([gathered.places_N, gathered.rows_N, occurrences_N], axis=1)
            decode_distinct(gathered.images, normalize, windows, images_NHWC, keys)
            sample_ids_N = sample_ids_N * is_real_N
        if not is_full or labels_N.dtype == object:
            labels_N = self._labels(labels_N, is_real_N)
        labels_N = change_batch(
            images_NHWC, labels_N, is_real_N, draws, augment,
            num_classes=len(self._source.schema.class_names), rows_per_stream=spec.rows_per_stream,
        )  # fmt: skip
        extra: dict[str, list[Value]] = {}
        for column in self._source.schema.extra:
            values = zip(gathered.extra(column.name), is_real_N.tolist(), strict=True)
            extra[column.name] = [value if is_real else None for value, is_real in values]
        return Batch(images_NHWC, labels_N, rows.weights_N, sample_ids_N, self._plan.epoch, step, extra)

    def _labels(self, stored_N: np.ndarray, is_real_N: np.ndarray) -> np.ndarray:
        """The labels of a batch from those of its rows, as in `ChunkRows`; padding has none."""
        if stored_N.dtype != object:
            stored_N[~is_real_N] = 0
            return stored_N
        schema = self._source.schema
        shape = label_shape(schema.label_type, len(schema.class_names))
        labels_N = np.zeros((len(stored_N), *shape), dtype=np.float32)
        for place in np.flatnonzero(is_real_N).tolist():
            labels_N[place, stored_N[place]] = 1
        return labels_N


def read_batches(
    dataset: Dataset,
    plan: EpochPlan,
    *,
    streams: range | None = None,
    first_step: int = 0,
    options: ReaderOptions | None = None,
    augment: AugmentOptions | None = None,
) -> BatchReader[Batch]:
    """Read an epoch, or its rest from `first_step`, for a rank's streams (all of them by default).

    Raises UsageError for streams or a step that the plan does not have. Iterating raises IntegrityError for a chunk
    that is missing or altered, StorageError if storage fails, and UsageError in a fork of the process that began to.
    """
    num_streams = plan.spec.num_streams
    if streams is not None and (not streams or not set(streams) <= set(range(num_streams))):
        raise UsageError(
            f"streams = {streams}", f"expected some of the plan's {num_streams}, as streams_of_rank gives them"
        )
    source = RowSource(
        dataset,
        plan.spec,
        range(num_streams) if streams is None else streams,
        options=options or ReaderOptions(),
        rows=RowOptions(augment or NO_CHANGES),
    )
    return read_epoch(source, plan, first_step)


def read_epoch(source: RowSource, plan: EpochPlan, first_step: int = 0) -> BatchReader[Batch]:
    """As `read_batches`, for epoch after epoch: what `source` keeps of one is used by the next."""
    if not 0 <= first_step <= plan.num_steps:
        raise UsageError(f"first_step = {first_step}", f"expected 0 to {plan.num_steps}, the steps of the epoch")
    return BatchReader(source, plan, first_step=first_step, finish=lambda batch, origins: batch)


def read_split(
    dataset: Dataset, split: str, *, batch_size: int = 64, format: str = "auto", augment: AugmentOptions | None = None
) -> BatchReader[Batch]:
    """Read a split once, in stored order, in batches of exactly `batch_size`; padding of the last one has weight 0."""
    spec = dataset.plan_spec(split, seed=0, global_batch_size=batch_size, num_streams=1, shuffle=False)
    return read_batches(dataset, dataset.plan_epoch(spec, 0), options=ReaderOptions(format=format), augment=augment)
