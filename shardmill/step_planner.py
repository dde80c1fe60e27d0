"""Which rows each step takes of the windows of an epoch plan, step after step, for a group of streams."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardmill.epoch_plan import EpochPlan, StepRows, Window

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
