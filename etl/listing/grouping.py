"""Groups rows of a dataset, or of a listing, that share a digest.

Two functions say what is asked, and each engine runs them in its own way: on one machine through files on disk, on
Spark through its shuffle. Which rows are in which part follows from their digests alone, so all answers are the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from shardmill.checksummed import ChecksummedFile
from shardmill.dataset.row_segments import read_segment
from shardmill.jobs.process import scratch_folder
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store

ROWS_PER_PART = 500_000
"""Number of rows, of 100 to 200 bytes each, in memory at once."""
# Reading from an object store is mostly waiting.
_NUM_READERS = 8


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the rows, such as a shard's row segment."""

    file: ChecksummedFile
    num_rows: int


@dataclass(frozen=True, slots=True)
class GroupBy:
    """A group-by over all rows that share a digest. It is sent to tasks, so its functions are
    module-level functions.
    """

    uri: str
    """The store that holds the segments."""
    segments: tuple[Segment, ...]
    schema: pa.Schema
    """The columns to read of each segment; reading all of a row segment takes three times as long as two columns."""
    pick: Callable[[pa.Table, int], pa.Table]
    """Selects the contribution of a segment's rows, given the segment's position; the first column is the digest: 32
    bytes of it, or 8 as int64.
    """
    picked: pa.Schema
    fold: Callable[[pa.Table], pa.Table]
    """The answer of one part: contributions of which every digest's rows are all there, in the order of segments."""
    folded: pa.Schema
    scratch_dir: str = ""
    """Spill folder of the local machine; empty for the temporary folder."""
    rows_per_part: int = ROWS_PER_PART
    dataset_uri: str = ""
    """A store that every task sees, if `uri` is a folder of the driver's machine; empty: they see `uri`."""

    @property
    def num_rows(self) -> int:
        """Number of rows of all segments."""
        return sum(segment.num_rows for segment in self.segments)

    @property
    def num_parts(self) -> int:
        """Parts of which each fits in a task's memory."""
        return max(1, -(-self.num_rows // self.rows_per_part))

    def contribution(self, store: Store, place: int) -> pa.Table:
        """Return the contribution of one segment. Raises IntegrityError if it does not match its index."""
        segment = self.segments[place]
        return self.pick(read_segment(store, segment.file, self.schema, segment.num_rows), place)

    def parts_of(self, contribution: pa.Table) -> np.ndarray:
        """The part of each row, by its digest; shape (N,), int64."""
        prefixes_N = digest_prefixes(contribution.column(0))
        return ((prefixes_N >> np.uint64(32)) * np.uint64(self.num_parts) >> np.uint64(32)).astype(np.int64)


Group = Callable[[GroupBy], Iterator[pa.Table]]
"""A group-by -> the answers of its parts, in order."""


def group_here(group: GroupBy, settings: object = None) -> Iterator[pa.Table]:
    """Group in this process: contributions go to disk by their parts, and one part at a time is in memory.

    `settings`: those of the engine whose `group_rows` this is; it needs none.
    """
    store = open_store(group.uri)
    with scratch_folder(group.scratch_dir) as scratch:
        spilled = SpilledRows(scratch, group.picked)
        for rows in _contributions(group, store):
            spilled.add(rows, group.parts_of(rows))
        for part in range(group.num_parts):
            yield group.fold(spilled.read(part))


def _contributions(group: GroupBy, store: Store) -> Iterator[pa.Table]:
    """Of all segments, in order; a few of them wait in memory, of large ones one."""
    places = range(len(group.segments))
    largest = max((segment.num_rows for segment in group.segments), default=1)
    num_readers = max(1, min(_NUM_READERS, ROWS_PER_PART // max(1, largest)))
    with ThreadPoolExecutor(num_readers, "shardmill-groups") as pool:
        for first in range(0, len(places), num_readers):
            yield from pool.map(lambda place: group.contribution(store, place), places[first : first + num_readers])


def digest_prefixes(digests: pa.ChunkedArray) -> np.ndarray:
    """The first 8 bytes of each digest as one number; uint64, shape (N,)."""
    if pa.types.is_integer(digests.type):
        return digests.to_numpy().view(np.uint64)
    firsts = [np.empty(0, np.uint64)]
    for chunk in (each for each in digests.chunks if len(each)):
        # From the buffers, without a Python object for each: there may be very many rows of one digest.
        _, offsets, data = chunk.buffers()
        start = int(np.frombuffer(offsets, np.int32)[chunk.offset])
        firsts.append(np.frombuffer(data, ">u8", 4 * len(chunk), start)[::4].astype(np.uint64))
    return np.concatenate(firsts)


def with_equals(rows: pa.Table) -> pa.Table:
    """The rows of a part that may share their digest with another one: every one that does is among them."""
    _, places_N, times = np.unique(digest_prefixes(rows.column(0)), return_inverse=True, return_counts=True)
    return rows.filter(pa.array(times[places_N] > 1))


class SpilledRows:
    """Rows that are added in any order and read part by part; inside a part they keep their order.

    `folder` must exist; nothing else may write to it. Both methods raise StorageError for a disk that is full or fails.
    """

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        self._folder = folder
        self._schema = schema
        self._waiting: list[tuple[pa.Table, np.ndarray]] = []
        self._num_waiting = 0

    def add(self, rows: pa.Table, parts_N: np.ndarray) -> None:
        """Add rows of the schema, each to the part of its number."""
        self._waiting.append((rows, parts_N))
        self._num_waiting += rows.num_rows
        if self._num_waiting >= ROWS_PER_PART:
            self._write()

    def read(self, part: int) -> pa.Table:
        """All rows of a part; a part that nothing was added to is empty."""
        self._write()
        file = self._folder / f"part-{part:06d}"
        tables = [self._schema.empty_table()]
        if file.exists():
            with as_storage_error(file), file.open("rb") as stream:
                # One stream for each time that rows were written.
                while stream.peek(1):
                    tables.append(pa.ipc.open_stream(stream).read_all())
        return pa.concat_tables(tables)

    def _write(self) -> None:
        for part, rows in split_rows(self._waiting):
            file = self._folder / f"part-{part:06d}"
            with (
                as_storage_error(file, rows.nbytes),
                file.open("ab") as stream,
                pa.ipc.new_stream(stream, self._schema) as writer,
            ):
                writer.write_table(rows)
        self._waiting, self._num_waiting = [], 0


def split_rows(tables: list[tuple[pa.Table, np.ndarray]]) -> list[tuple[int, pa.Table]]:
    """The rows of all tables by the number of their part, without the parts that have none."""
    if not tables:
        return []
    rows = pa.concat_tables([table for table, _ in tables])
    parts_N = np.concatenate([parts for _, parts in tables])
    order_N = np.argsort(parts_N, kind="stable")
    rows, parts_N = rows.take(pa.array(order_N)), parts_N[order_N]
    bounds = [*np.flatnonzero(np.diff(parts_N, prepend=-1)).tolist(), len(parts_N)]
    return [(int(parts_N[start]), rows.slice(start, end - start)) for start, end in itertools.pairwise(bounds)]
