"""Parquet files as tables: by columns for a listing, by rows for a task, in bounded memory whatever a writer stored."""

from __future__ import annotations

import bisect
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.names import PARQUET_SUFFIXES
from etl.sources.row_file import BATCH_ROWS, RowFormat, RowImage, blocks_of
from etl.sources.rows import ImageRows
from shardmill.errors import IntegrityError
from shardmill.storage import StoredFile

_MAGIC, _TAIL_BYTES = b"PAR1", 8
_WRITERS_TYPES = b"ARROW:schema"
# What the rows that are decoded at once may become in memory; a page may repeat one long value in each of them.
_MAX_DECODED_BYTES, _MAX_READ_ROWS = 256_000_000, 64


class ParquetFile:
    """One file. Row groups are blocks, and large ones several: a work unit must not read as much as a file."""

    def __init__(self, stream: BinaryIO, file: StoredFile) -> None:
        self._stream, self._metadata = stream, _read_footer(stream)
        self.num_rows = self._metadata.num_rows
        self.schema = self._metadata.schema.to_arrow_schema()
        rows = [self._metadata.row_group(number).num_rows for number in range(self._metadata.num_row_groups)]
        # First row of each row group, and the end of the last one.
        self._first_rows = (0, *itertools.accumulate(rows))

    def batches(self, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Raises IntegrityError if rows would become too large."""
        # A text that repeats is small until it is written out for each row, so texts are read as dictionaries.
        leaves = (self._metadata.schema.column(place) for place in range(len(self._metadata.schema)))
        texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
        parquet = pq.ParquetFile(self._stream, metadata=self._metadata, read_dictionary=texts, pre_buffer=False)
        for group, (start, _) in enumerate(itertools.pairwise(self._first_rows)):
            for rows in _column_batches(parquet, group, names):
                places_N = np.arange(start, start + rows.num_rows, dtype=np.int64)
                yield rows, places_N, blocks_of(places_N, self._first_rows, group)
                start += rows.num_rows

    def images(self, leaf: str) -> Callable[[int], RowImage]:
        """Decodes a few rows at a time."""
        # Buffered, so that a column chunk is streamed instead of loaded whole.
        parquet = pq.ParquetFile(self._stream, metadata=self._metadata, pre_buffer=False, buffer_size=1 << 20)
        group, start, values = -1, 0, pa.array([], pa.binary())
        batches: Iterator[pa.RecordBatch] = iter(())

        def read(row: int) -> RowImage:
            nonlocal group, start, values, batches
            wanted = bisect.bisect_right(self._first_rows, row) - 1
            if wanted != group or row < start:
                group, start, values = wanted, self._first_rows[wanted], values[:0]
                batches = parquet.iter_batches(
                    self.rows_at_once(group, leaf), row_groups=[group], columns=[leaf], use_threads=False
                )
            while row >= start + len(values):
                start += len(values)
                batch = next(batches, None)
                if batch is None:
                    raise IntegrityError(f"row group {group} ends before row {row}")
                values = batch.column(0)
            return values[row - start].as_py()

        return read

    def rows_at_once(self, group: int, leaf: str) -> int:
        """How many images are decoded together: so many that the largest of them fit."""
        metadata = self._metadata.row_group(group)
        columns = (metadata.column(number) for number in range(metadata.num_columns))
        chunk = next(column for column in columns if column.path_in_schema == leaf)
        # In a dictionary one value may be used by every row; without one, the values add up to the chunk.
        largest = chunk.total_uncompressed_size / (1 if chunk.has_dictionary_page else max(1, metadata.num_rows))
        return int(min(_MAX_READ_ROWS, max(1, _MAX_DECODED_BYTES // max(1, largest))))


PARQUET = RowFormat("Parquet", PARQUET_SUFFIXES, ParquetFile)
claims = PARQUET.holds_images


class ParquetSource(ImageRows):
    """Every row of the Parquet files that `source.uri` names: a folder, one file, or a pattern."""

    row_format = PARQUET


def _read_footer(stream: BinaryIO) -> pq.FileMetaData:
    """A file's metadata without the types that its writer had in memory; the stream is at its start again.

    Parquet has one type of bytes. Arrow has five (`large_binary`, `binary_view`, dictionaries, ...), names the writer's
    in the file, and fails to open it if an older Arrow does not know the one that a newer one named.
    """
    stream.seek(0, os.SEEK_END)
    stream.seek(max(0, stream.tell() - _TAIL_BYTES))
    tail = stream.read(_TAIL_BYTES)
    stream.seek(max(0, stream.tell() - _TAIL_BYTES - int.from_bytes(tail[:4], "little")))
    footer = stream.read()
    stream.seek(0)
    if not tail.endswith(_MAGIC) or len(footer) != _TAIL_BYTES + int.from_bytes(tail[:4], "little"):
        return pq.read_metadata(stream)  # which says what is wrong
    return pq.read_metadata(io.BytesIO(_MAGIC + footer.replace(_WRITERS_TYPES, _WRITERS_TYPES.lower())))


def _column_batches(parquet: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.Table]:
    num_rows = parquet.metadata.row_group(group).num_rows
    if not names:
        for start in range(0, num_rows, BATCH_ROWS):
            yield pa.table({"": pa.nulls(min(BATCH_ROWS, num_rows - start))})
        return
    for batch in parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=list(names)):
        yield pa.Table.from_batches([batch]).replace_schema_metadata(parquet.schema_arrow.metadata)
