"""Spills rows to disk in parts that each fit in memory, for group-bys and look-ups by shard."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa

from shardmill.storage_errors import as_storage_error

ROWS_PER_PART = 500_000
"""Number of rows, of 100 to 200 bytes each, in memory at once."""


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
