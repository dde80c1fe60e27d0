"""Reads the planned rows of an epoch as batches, in planned order for any timing of the reader threads.

The consuming thread plans; reader threads fetch, verify, decode and augment, several of them a large batch, one of them
several small ones: the thread that ends the last part of a batch finishes it. Finished batches wait in a queue that is
bounded in bytes, and a fault in any thread is raised in place of its batch. Shape legend: N batch, H height, W width,
C channels, K steps of a block.
"""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from shardmill.augment.options import NO_CHANGES, AugmentOptions
from shardmill.epoch_plan import EpochPlan, StepRows, Window
from shardmill.errors import UsageError
from shardmill.formats.rows import ChunkRows
from shardmill.loader.row_source import Chunks, LiveRows, Origins, ReaderOptions, RowOptions, RowSource
from shardmill.loader.step_decoder import StepDecoder, StepUses
from shardmill.values import Batch

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset


Item = TypeVar("Item")
Result = TypeVar("Result")
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
        together = self._source.steps_together
        waiting: collections.deque[tuple[range, Future[list[Item]]]] = collections.deque()
        try:
            for first in range(self._first_step, self._plan.num_steps, together):
                steps = range(first, min(first + together, self._plan.num_steps))
                waiting.append((steps, self._begin(steps, list)))
                # A finished batch does not wait for the queue to fill.
                while waiting and (len(waiting) * together > self._source.max_batches_ahead or waiting[0][1].done()):
                    yield from self._items(*waiting.popleft())
            while waiting:
                yield from self._items(*waiting.popleft())
        finally:
            if not self._process.is_another:
                for _, future in waiting:
                    future.cancel()

    def _items(self, steps: range, future: Future[list[Item]]) -> Iterator[Item]:
        """Of steps that were begun together; if one has failed, each alone, so that those before it come."""
        try:
            items = iter(future.result())
        except Exception as error:
            if len(steps) == 1 or isinstance(error, CancelledError):
                raise
            items = (self.submit(step).result() for step in steps)
        for item in items:
            yield item
            self._process.check()

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
        return self._begin((step,), lambda items: items[0])

    def _begin(self, steps: Sequence[int], result: Callable[[list[Item]], Result]) -> Future[Result]:
        """-> what `result` makes of the items of consecutive steps, which are decoded together."""
        self._process.check()
        uses = list(map(self._uses_of, steps))
        chunks = [each.rows.chunks_N for each in uses]
        futures = self._futures_of(chunks[0] if len(chunks) == 1 else np.concatenate(chunks))
        making = StepDecoder(self._source, self._plan, uses, self._live, futures)
        work, finish = partial(self._decode, making), lambda: result(self._finished(making))
        return share(self._decode_pool, self._source.num_parts, work, finish)

    def _uses_of(self, step: int) -> StepUses:
        rows, selection = self._planner.rows_of_step(step), self._source.rows.selection
        if selection is None:
            return StepUses(step, rows, np.zeros_like(rows.rows_N))
        return StepUses(step, selection.rows_of(rows), selection.occurrences_of(rows))

    def _futures_of(self, chunks_N: np.ndarray) -> Chunks:
        """Begin to read the chunks of steps that are not in memory. -> those that no earlier step has needed."""
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

    def _decode(self, making: StepDecoder, part: int) -> None:
        making.wait()
        started = time.perf_counter()
        making.decode(part)
        self._count(ReaderSeconds(decode=time.perf_counter() - started))

    def _finished(self, making: StepDecoder) -> list[Item]:
        started = time.perf_counter()
        finished = [self._finish(batch, origins) for batch, origins in making.batches()]
        self._count(ReaderSeconds(decode=time.perf_counter() - started))
        return finished

    def _count(self, more: ReaderSeconds) -> None:
        with self._lock:
            self._seconds += more


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


def share(pool: Executor, num_parts: int, work: Callable[[int], None], finish: Callable[[], Item]) -> Future[Item]:
    """Begin `work(part)` for each part, in any order and at once; the thread that ends the last one calls `finish`.

    The future has what `finish` returns, or what the first part that failed has raised. No thread waits for another, so
    a pool cannot come to a stop. Parts of a cancelled future that have not begun are left out; the future is
    cancelled if the pool is shut down without one of them.
    """
    if num_parts == 1:
        return pool.submit(_whole, work, finish)
    shared = _SharedWork(num_parts, work, finish)
    for part in range(num_parts):
        pool.submit(shared.do, part).add_done_callback(shared.without)
    return shared.future


def _whole(work: Callable[[int], None], finish: Callable[[], Item]) -> Item:
    work(0)
    return finish()


class _SharedWork(Generic[Item]):
    def __init__(self, num_parts: int, work: Callable[[int], None], finish: Callable[[], Item]) -> None:
        self.future: Future[Item] = Future()
        self._work = work
        self._finish = finish
        self._errors: list[BaseException | None] = [None] * num_parts
        self._num_left = num_parts
        self._lock = threading.Lock()

    def do(self, part: int) -> None:
        if not self.future.cancelled():
            try:
                self._work(part)
            except BaseException as error:
                self._errors[part] = error
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        # From here on it can no longer be cancelled.
        if is_last and self.future.set_running_or_notify_cancel():
            self._end()

    def without(self, part: Future[None]) -> None:
        """Cancel all if the pool has given up a part."""
        if part.cancelled():
            self.future.cancel()

    def _end(self) -> None:
        error = next(filter(None, self._errors), None)
        if error is not None:
            self.future.set_exception(error)
            return
        try:
            item = self._finish()
        except BaseException as raised:
            self.future.set_exception(raised)
        else:
            self.future.set_result(item)


_BLOCK_STEPS = 64


class _Block(NamedTuple):
    """The rows of steps that end no window, made together: for small images, one by one they would take longest."""

    first_step: int
    chunks_KN: np.ndarray
    rows_KN: np.ndarray

    def rows_of_step(self, step: int) -> StepRows | None:
        place = step - self.first_step
        if not 0 <= place < len(self.chunks_KN):
            return None
        chunks_N = self.chunks_KN[place]
        return StepRows(chunks_N, self.rows_KN[place], np.ones(len(chunks_N), dtype=np.float32))


class StepPlanner:
    """Rows of consecutive steps for a group of streams; keeps each stream's current window and rows of some steps."""

    def __init__(self, plan: EpochPlan, streams: range) -> None:
        self._plan = plan
        self._streams = streams
        self._windows: dict[int, Window] = {}
        self._batch_size = len(streams) * plan.spec.rows_per_stream
        self._block = _Block(0, np.empty((0, 0)), np.empty((0, 0)))
        self.num_windows = 0
        """That have become current so far."""

    def rows_of_step(self, step: int) -> StepRows:
        """The rows of `step`, stream by stream; each stream's part is padded to `rows_per_stream`.

        Padding repeats real rows, so that layers which look across a batch see pixels of the kind they know.
        """
        found = self._block.rows_of_step(step)
        if found is None:
            self._block = self._block_at(step)
            found = self._block.rows_of_step(step) or self._rows_of_any_step(step)
        return found

    def _block_at(self, step: int) -> _Block:
        """The steps from `step` on that the current windows hold in full; none if they do not hold this one."""
        per_stream = self._plan.spec.rows_per_stream
        starts, num_steps = [], _BLOCK_STEPS
        for stream in self._streams:
            window, first = self._windows.get(stream), step * per_stream
            if window is None or first < window.start:
                return _Block(step, np.empty((0, 0)), np.empty((0, 0)))
            starts.append(first - window.start)
            num_steps = min(num_steps, (window.stop - first) // per_stream)
        shape = (max(0, num_steps), len(self._streams), per_stream)
        chunks, rows = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        for place, (stream, start) in enumerate(zip(self._streams, starts, strict=True)):
            window, here = self._windows[stream], slice(start, start + shape[0] * per_stream)
            chunks[:, place] = window.chunks_N[here].reshape(-1, per_stream)
            rows[:, place] = window.rows_N[here].reshape(-1, per_stream)
        return _Block(step, chunks.reshape(shape[0], self._batch_size), rows.reshape(shape[0], self._batch_size))

    def _rows_of_any_step(self, step: int) -> StepRows:
        per_stream = self._plan.spec.rows_per_stream
        shape = (len(self._streams), per_stream)
        chunks, rows = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        weights = np.zeros(shape, dtype=np.float32)
        for place, stream in enumerate(self._streams):
            first = step * per_stream
            stop = min(first + per_stream, self._plan.stream_rows(stream))
            position = first
            # A step may end one window and begin the next.
            while position < stop:
                window = self._window_at(stream, position)
                until = min(stop, window.stop)
                here = slice(position - first, until - first)
                there = slice(position - window.start, until - window.start)
                chunks[place, here], rows[place, here] = window.chunks_N[there], window.rows_N[there]
                weights[place, here] = 1.0
                position = until
            num_real = max(0, stop - first)
            if 0 < num_real < per_stream:
                repeated = np.arange(per_stream - num_real) % num_real
                chunks[place, num_real:], rows[place, num_real:] = chunks[place, repeated], rows[place, repeated]
            elif num_real == 0 and stop > 0:
                window = self._window_at(stream, stop - 1)
                chunks[place], rows[place] = window.chunks_N[-1], window.rows_N[-1]
        return StepRows(chunks.reshape(-1), rows.reshape(-1), weights.reshape(-1))

    def live_chunks(self) -> set[int]:
        """Chunks of the current windows: what a reader should keep."""
        return {chunk for window in self._windows.values() for chunk in window.chunk_numbers}

    def _window_at(self, stream: int, position: int) -> Window:
        window = self._windows.get(stream)
        if window is None or not window.start <= position < window.stop:
            window = self._windows[stream] = self._plan.window_at(stream, position)
            self.num_windows += 1
        return window
