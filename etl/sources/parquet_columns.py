"""Reads Parquet files by columns and by rows, in bounded memory, whatever their writer stored."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import bisect
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.sources.columns import choose_column
from shardmill.errors import IntegrityError, UsageError
from shardmill.words import printable

_BATCH_ROWS = 65_536
_MAGIC, _TAIL_BYTES = b"PAR1", 8
_WRITERS_TYPES = b"ARROW:schema"
# What one batch may become in memory: few bytes of a hostile file can expand to one long text in every row.
_MAX_BATCH_BYTES = 1 << 30


def open_columns(stream: BinaryIO) -> pq.ParquetFile:
    """A file whose texts are read as dictionaries: one that repeats is small until it is written out for each row."""
    metadata = read_footer(stream)
    leaves = (metadata.schema.column(place) for place in range(len(metadata.schema)))
    texts = [leaf.path for leaf in leaves if leaf.logical_type.type == "STRING"]
    return pq.ParquetFile(stream, metadata=metadata, read_dictionary=texts, pre_buffer=False)


def read_footer(stream: BinaryIO) -> pq.FileMetaData:
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


def column_batches(parquet: pq.ParquetFile, group: int, names: Sequence[str]) -> Iterator[pa.Table]:
    """Some columns of a row group, with the file's metadata; a batch without columns still has its rows.

    Raises IntegrityError if the rows would become too large.
    """
    num_rows = parquet.metadata.row_group(group).num_rows
    if not names:
        for start in range(0, num_rows, _BATCH_ROWS):
            yield pa.table({"": pa.nulls(min(_BATCH_ROWS, num_rows - start))})
        return
    for batch in parquet.iter_batches(_BATCH_ROWS, row_groups=[group], columns=list(names)):
        rows = pa.Table.from_batches([batch])
        for column in rows.columns:
            _check_texts(column)
        yield rows.replace_schema_metadata(parquet.schema_arrow.metadata)


def bytes_leaf(field: pa.Field) -> str | None:
    """The name of a column of bytes, or of the bytes inside a struct, as Hugging Face writes images; else None."""
    kind = field.type
    if pa.types.is_binary(kind):
        return field.name
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return f"{field.name}.bytes" if pa.types.is_binary(kind.field("bytes").type) else None
    return None


def image_column(schema: pa.Schema, configured: str, where: str, key: str = "image_field") -> str:
    """The leaf that holds the bytes of images, or of what `source.KEY` names.

    Raises UsageError if there is none, or several could be meant.
    """
    leaves = {name: leaf for name in schema.names if (leaf := bytes_leaf(schema.field(name))) is not None}
    found = choose_column(list(leaves), configured, ("image", "img"), key)
    if found is None and len(leaves) == 1:
        [found] = leaves
    lists = [field.name for field in schema if holds_lists_of_bytes(field)]
    if found is None and lists:
        raise UsageError(
            f"the column {printable(lists[0])!r} of {printable(where)} contains lists of images",
            "expected one image in each row",
            "write a row for each image, with the label of its list; or name another column with source.image_field",
        )
    if found is None:
        raise UsageError(
            f"{printable(where)} has the columns {', '.join(map(printable, schema.names[:20]))}",
            "expected one with an image's bytes: binary, or a struct with a field `bytes`",
            "name it with source.image_field; for a table of file names use source.kind=table",
        )
    return leaves[found]


def holds_lists_of_bytes(field: pa.Field) -> bool:
    """Whether a value of the column is a list of what may be images."""
    kind = field.type
    if not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return False
    inner = pa.field(field.name, kind.item_type if pa.types.is_map(kind) else kind.value_type)
    return bytes_leaf(inner) is not None or holds_lists_of_bytes(inner)


def _check_texts(column: pa.ChunkedArray) -> None:
    for chunk in column.chunks:
        chunk = pc.list_flatten(chunk) if pa.types.is_list(chunk.type) else chunk
        if not pa.types.is_dictionary(chunk.type):
            continue
        lengths = pc.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
        if lengths[chunk.indices.drop_null().to_numpy()].sum() > _MAX_BATCH_BYTES:
            raise IntegrityError(
                f"{_BATCH_ROWS} of its rows would become more than {_MAX_BATCH_BYTES} bytes", "expected short texts"
            )


# What the rows that are decoded at once may become in memory; a page may repeat one long value in each of them.
_MAX_DECODED_BYTES, _MAX_READ_ROWS = 256_000_000, 64
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
        return int(min(_MAX_READ_ROWS, max(1, _MAX_DECODED_BYTES // max(1, largest))))
