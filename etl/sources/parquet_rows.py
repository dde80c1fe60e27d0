"""Reads a column of images or masks of one Parquet file row by row, and cuts large row groups into blocks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.parquet_columns import image_column, read_footer
from shardmill.errors import IntegrityError

# What the rows that are decoded at once may become in memory; a page may repeat one long value in each of them.
_MAX_BATCH_BYTES, _MAX_READ_ROWS = 256_000_000, 64
# A row group is decoded from its beginning for each of its blocks: at most so many, so 4.5 times in all.
_MAX_BLOCKS_OF_GROUP, _MIN_BLOCK_ROWS = 8, 1_024


@dataclass(frozen=True, slots=True)
class Blocks:
    """Row groups are blocks, and large ones several: what one work unit reads must not be as large as a file."""

    first_rows: tuple[int, ...]
    """First row of each row group, and the end of the last one."""

    @classmethod
    def of_file(cls, metadata: pq.FileMetaData) -> Blocks:
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        return cls((0, *itertools.accumulate(rows)))

    def group_of(self, row: int) -> int:
        """The row group that holds a row of the file."""
        return bisect.bisect_right(self.first_rows, row) - 1

    def of(self, rows_N: np.ndarray, group: int) -> np.ndarray:
        """The block of each of these rows of a row group, int64: the number of the group, if it is one block."""
        first, end = self.first_rows[group], self.first_rows[group + 1]
        block_rows = max(_MIN_BLOCK_ROWS, -(-(end - first) // _MAX_BLOCKS_OF_GROUP))
        return group + (rows_N - first) // block_rows * (len(self.first_rows) - 1)


class BytesRows:
    """A column of bytes of one file, decoded a few rows at a time in the order of the file."""

    def __init__(self, stream: BinaryIO, path: str, field: str, key: str = "image_field") -> None:
        """`field`: its name, that `source.KEY` gives; empty for a usual one of images."""
        # Buffered, so that a column chunk is streamed instead of loaded whole.
        self._parquet = pq.ParquetFile(stream, metadata=read_footer(stream), pre_buffer=False, buffer_size=1 << 20)
        self._column = image_column(self._parquet.schema_arrow, field, path, key)
        self._blocks = Blocks.of_file(self._parquet.metadata)
        self._group, self._start = -1, 0
        self._batch: pa.Array = pa.array([], pa.binary())
        self._batches: Iterator[pa.RecordBatch] = iter(())

    def read(self, row: int) -> bytes | None:
        """One row's bytes, or None. Rows of a row group in ascending order are decoded once, from its beginning on."""
        group = self._blocks.group_of(row)
        if group != self._group or row < self._start:
            self._begin(group)
        while row >= self._start + len(self._batch):
            self._start += len(self._batch)
            batch = next(self._batches, None)
            if batch is None:
                raise IntegrityError(f"row group {group} ends before row {row}")
            column = batch.column(0)
            self._batch = column.field("bytes") if pa.types.is_struct(column.type) else column
        return self._batch[row - self._start].as_py()

    def _begin(self, group: int) -> None:
        self._group, self._start, self._batch = group, self._blocks.first_rows[group], self._batch[:0]
        self._batches = self._parquet.iter_batches(
            self._rows_at_once(group), row_groups=[group], columns=[self._column], use_threads=False
        )

    def _rows_at_once(self, group: int) -> int:
        metadata = self._parquet.metadata.row_group(group)
        columns = (metadata.column(number) for number in range(metadata.num_columns))
        chunk = next(column for column in columns if column.path_in_schema == self._column)
        # In a dictionary one value may be used by every row; without one, the values add up to the chunk.
        largest = chunk.total_uncompressed_size / (1 if chunk.has_dictionary_page else max(1, metadata.num_rows))
        return int(min(_MAX_READ_ROWS, max(1, _MAX_BATCH_BYTES // max(1, largest))))
