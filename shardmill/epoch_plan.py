"""Contract 2: plans which rows form global step k of an epoch, for any number of ranks; integers in, integers out, no
I/O.

The chunks of a split, permuted by (seed, epoch), form one virtual row sequence. It is cut into `num_streams` logical
streams whose lengths differ by at most one. A stream shuffles its rows inside windows of `window_chunks` chunks.
Global step k takes the same number of rows of each stream, in stream order; missing rows at the end are padding.
A rank owns a contiguous group of streams, so the content of a global batch does not depend on how many ranks there are.

A worked example: chunks of 3, 2 and 3 rows, permuted to (2, 0, 1); two streams of 4 rows; global batch 4.

    virtual row   0  1  2 | 3  4  5 | 6  7          chunk 2 | chunk 0 | chunk 1
    stream 0      0  1  2   3                       two windows of one chunk: rows 0-2, row 3
    stream 1                   4  5   6  7          two windows of one chunk: rows 4-5, rows 6-7
    step 0        two rows of each stream; step 1: the other two of each
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from shardmill.errors import UsageError
from shardmill.mix import permutation

PLAN_VERSION = 1

# Independent draws get a first key of their own.
_CHUNK_ORDER, _WINDOW_ORDER = 1, 2
_BLOCK_CHUNKS = 1 << 20


@dataclass(frozen=True, slots=True)
class PlanSpec:
    """The values that determine every epoch of a plan; equal specs over equal indexes give equal batches everywhere."""

    layout_digest: str
    split: str
    seed: int
    global_batch_size: int
    num_streams: int
    window_chunks: int
    shuffle: bool = True
    selection: str = ""
    """Digest of how often each row of the split is used; empty if that is once."""

    def __post_init__(self) -> None:
        if self.num_streams < 1 or self.global_batch_size < 1 or self.global_batch_size % self.num_streams:
            raise UsageError(
                f"global_batch_size = {self.global_batch_size} with num_streams = {self.num_streams}",
                (
                    "expected a batch that the streams divide evenly, because each contributes the same number of "
                    "rows to a step"
                ),
                f"use a batch of {_near_multiple(self.global_batch_size, self.num_streams)}, or streams that divide it",
            )
        assert self.window_chunks >= 1

    @property
    def rows_per_stream(self) -> int:
        """Rows that one stream gives to one step, padding included."""
        return self.global_batch_size // self.num_streams

    def num_steps(self, num_rows: int) -> int:
        """Steps of an epoch over so many rows, equal on every rank: those that the longest stream needs."""
        longest = -(-num_rows // self.num_streams)
        return -(-longest // self.rows_per_stream)

    @property
    def fingerprint(self) -> str:
        """Names this plan in cursors and checkpoints."""
        fields = {"plan_version": PLAN_VERSION, **asdict(self)}
        if not self.selection:
            # Plans of all rows keep the name that they had before rows could be selected.
            del fields["selection"]
        text = json.dumps(fields, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _near_multiple(number: int, of: int) -> int:
    of = max(1, of)
    return max(1, round(number / of)) * of


class StepRows(NamedTuple):
    """The rows of one step for some streams, in batch order. Padding repeats rows of its stream with weight 0."""

    chunks_N: np.ndarray
    rows_N: np.ndarray
    weights_N: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A run of a stream inside which rows are shuffled; it holds the stream's positions [start, start + len)."""

    start: int
    chunk_numbers: frozenset[int]
    chunks_N: np.ndarray
    """Chunk of each row, in shuffled order."""
    rows_N: np.ndarray
    """Row within its chunk."""

    @property
    def stop(self) -> int:
        return self.start + len(self.rows_N)


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """The whole order of one epoch, as two arrays over the chunks of the split."""

    spec: PlanSpec
    epoch: int
    chunk_order: np.ndarray
    """Chunk numbers in virtual order."""
    chunk_starts: np.ndarray
    """The first virtual row of each chunk in virtual order, and the number of rows at the end."""

    @property
    def num_rows(self) -> int:
        return int(self.chunk_starts[-1])

    @property
    def num_steps(self) -> int:
        """Steps of the epoch, equal on every rank."""
        return self.spec.num_steps(self.num_rows)

    def stream_start(self, stream: int) -> int:
        """The first virtual row of a stream; that of stream `num_streams` is the number of rows."""
        return stream * self.num_rows // self.spec.num_streams

    def stream_rows(self, stream: int) -> int:
        """Rows in a stream."""
        return self.stream_start(stream + 1) - self.stream_start(stream)

    def num_rows_of_step(self, step: int, streams: range | None = None) -> int:
        """Rows without padding in a step: its global weight, known to every rank without asking the others."""
        first = step * self.spec.rows_per_stream
        streams = range(self.spec.num_streams) if streams is None else streams
        if first + self.spec.rows_per_stream <= self.num_rows // self.spec.num_streams:
            # No stream has fewer rows than that.
            return len(streams) * self.spec.rows_per_stream
        return sum(min(max(self.stream_rows(stream) - first, 0), self.spec.rows_per_stream) for stream in streams)

    def window_at(self, stream: int, position: int) -> Window:
        """The window that holds the row at `position` of `stream`. Costs no more at the end of an epoch."""
        start, stop = self.stream_start(stream), self.stream_start(stream + 1)
        assert 0 <= position < stop - start
        # Windows count chunks from the one in which the stream begins.
        first_chunk = self._chunk_at(start)
        index = (self._chunk_at(start + position) - first_chunk) // self.spec.window_chunks
        first = first_chunk + index * self.spec.window_chunks
        last = min(first + self.spec.window_chunks, len(self.chunk_order))
        window_start = max(start, int(self.chunk_starts[first]))
        window_stop = min(stop, int(self.chunk_starts[last]))
        # In stored order the rows of a chunk are one run; behind the shuffle each row would have to be searched for.
        borders = self.chunk_starts[first : last + 1].clip(window_start, window_stop)
        places_N = np.repeat(np.arange(first, last), np.diff(borders))
        chunks_N = self.chunk_order[places_N].astype(np.int64)
        rows_N = np.arange(window_start, window_stop) - self.chunk_starts[places_N]
        if self.spec.shuffle:
            order_N = permutation(len(rows_N), _WINDOW_ORDER, self.spec.seed, self.epoch, stream, index)
            chunks_N, rows_N = chunks_N[order_N], rows_N[order_N]
        return Window(
            start=window_start - start,
            chunk_numbers=frozenset(self.chunk_order[first:last].tolist()),
            chunks_N=chunks_N,
            rows_N=rows_N,
        )

    def _chunk_at(self, virtual_row: int) -> int:
        return int(np.searchsorted(self.chunk_starts, virtual_row, side="right")) - 1


def plan_epoch(spec: PlanSpec, chunk_rows: np.ndarray, epoch: int) -> EpochPlan:
    """The order of one epoch over a split whose chunk c has `chunk_rows[c]` rows (each at least 1)."""
    num_chunks = len(chunk_rows)
    # In place, in blocks, and in 32 bits if they are enough: of 2 * 10^7 chunks each array of 64 bits is 160 MB, and
    # NumPy turns indices into 64 bits where they are used.
    dtype = np.int32 if num_chunks < 1 << 31 else np.int64
    if spec.shuffle:
        order = permutation(num_chunks, _CHUNK_ORDER, spec.seed, epoch).astype(dtype)
    else:
        order = np.arange(num_chunks, dtype=dtype)
    starts = np.zeros(num_chunks + 1, dtype=np.int64)
    for first in range(0, num_chunks, _BLOCK_CHUNKS):
        block = order[first : first + _BLOCK_CHUNKS]
        starts[first + 1 : first + 1 + len(block)] = chunk_rows[block]
    np.cumsum(starts[1:], out=starts[1:])
    return EpochPlan(spec, epoch, order, starts)


USUAL_STREAMS = 8
"""The usual maximum number of ranks, so that an epoch is the same at every usual world size."""


def num_streams_for(global_batch_size: int, world_size: int = 1) -> int:
    """Return the default number of streams: a divisor of the global batch, and equal for up to 8 ranks.

    The smallest divisor that is at least 8 and at least `world_size`; the whole batch if there is none.
    """
    return next(
        (number for number in num_streams_choices(global_batch_size) if number >= world_size), global_batch_size
    )


def num_streams_choices(global_batch_size: int) -> Iterator[int]:
    """All numbers that `num_streams_for` gives for this batch, ascending."""
    yield from (number for number in range(USUAL_STREAMS, global_batch_size) if global_batch_size % number == 0)
    yield global_batch_size


def streams_of_rank(rank: int, world_size: int, num_streams: int) -> range:
    """The contiguous streams that a rank owns; counts differ by at most one.

    Raises UsageError for more ranks than streams, and for an invalid rank.
    """
    if not 1 <= world_size <= num_streams:
        raise UsageError(
            f"{world_size} ranks for {num_streams} streams",
            f"expected 1 to {num_streams} ranks, because each owns at least one stream",
            f"set num_streams (train.num_streams) to {world_size} or more, to a divisor of the batch",
        )
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}", f"expected 0 to {world_size - 1}", "ranks are counted from 0")
    return range(rank * num_streams // world_size, (rank + 1) * num_streams // world_size)


def streams_by_weight(weights: Sequence[float], num_streams: int) -> list[range]:
    """The contiguous streams of each rank, in proportion to its weight and at least one; as many ranks as weights.

    By largest remainders: of two equal ones the first rank gets one more.
    """
    shares = [weight / sum(weights) * num_streams for weight in weights]
    counts = [max(1, int(share)) for share in shares]
    while sum(counts) < num_streams:
        counts[max(range(len(counts)), key=lambda rank: shares[rank] - counts[rank])] += 1
    while sum(counts) > num_streams:
        # A small weight got a whole stream: the rank that has most above its share gives one up.
        counts[max((rank for rank, n in enumerate(counts) if n > 1), key=lambda r: counts[r] - shares[r])] -= 1
    starts = [sum(counts[:rank]) for rank in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


WINDOW_BUDGET_BYTES = 256_000_000
"""The usual memory for the windows of one rank."""


def window_bytes_within(budget_bytes: int, streams_of_ranks: Sequence[range]) -> int:
    """The largest window of a stream with which those of any rank fit its budget, where a plan begins.

    Up to 8 ranks it is that of one rank with all streams: what begins at a usual world size is the same at every other.
    A plan keeps its window, on however many ranks it goes on.
    """
    counts = [len(streams) for streams in streams_of_ranks]
    return budget_bytes // (sum(counts) if len(counts) <= USUAL_STREAMS else max(counts))
