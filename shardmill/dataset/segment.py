"""Segments: the Parquet tables behind a manifest, published under their digest, read only within their stated size."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardmill.checksummed import ChecksummedFile, checksum_file, read_checksummed
from shardmill.errors import IntegrityError
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import as_numpy

if TYPE_CHECKING:
    from shardmill.values import ShardFile

RESTORE = "restore it from a copy, or delete it and run `shardmill etl`, which rebuilds what is missing"
"""The fix for a damaged file, for an error that names it."""

# Ours expand 5 to 50 times; a bomb is a file whose few bytes become gigabytes in memory.
_MAX_EXPANSION, _ALWAYS_ALLOWED_BYTES = 1000, 16_000_000


def require(holds: bool, problem: str) -> None:
    """Raise IntegrityError with `problem` unless the rule holds."""
    if not holds:
        raise IntegrityError(problem)


def table_bytes(table: pa.Table) -> bytes:
    """A segment's file."""
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def put_segment(store: Store, folder: str, table: pa.Table) -> ChecksummedFile:
    """Publish a table under a name that follows from its content."""
    data = table_bytes(table)
    digest = checksum_file("", data).sha256
    path = f"{folder}/{digest[:32]}.parquet"
    store.put(path, data)
    return checksum_file(path, data)


def rows_file(shard: ShardFile) -> ChecksummedFile:
    """A shard's row segment, with the size and digest of its index."""
    return ChecksummedFile(shard.rows_path, shard.rows_bytes, shard.rows_sha256)


def read_segment(store: Store, file: ChecksummedFile, schema: pa.Schema, max_rows: int) -> pa.Table:
    """The columns of `schema` from a verified segment; `max_rows` is what the record that names it counted.

    Raises IntegrityError if the segment is missing, altered, lacks a column or is larger than it may be.
    """
    table = read_coded_segment(store, file, schema, max_rows)
    return pa.table([_plain(table.column(field.name)) for field in schema], schema=schema)


def read_coded_segment(store: Store, file: ChecksummedFile, schema: pa.Schema, max_rows: int) -> pa.Table:
    """As `read_segment`, with texts as places in dictionaries: one that repeats is compared and copied as a number."""
    data = read_checksummed(store, file, fix=RESTORE)
    where = join_uri(store.uri, file.path)
    try:
        footer = pq.read_metadata(pa.BufferReader(data))
        _check_footer(footer, schema, max_rows, len(data), where)
        # As dictionaries first: a long text that repeats is small until it is written out for each row. They must be
        # there. And `read_table` would look for a dataset in each of thousands of small files.
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        parquet = pq.ParquetFile(pa.BufferReader(data), metadata=footer, read_dictionary=texts, pre_buffer=False)
        table = parquet.read(columns=schema.names, use_threads=False)
        # Places in dictionaries, UTF-8.
        table.validate(full=True)
        # A bound comes first: for an index, the sum itself takes as long as reading.
        if sum(map(_most_plain_bytes, table.columns)) > _allowed_bytes(len(data)):
            _check_size(sum(map(_plain_bytes, table.columns)), len(data), where)
        return table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{where} does not parse: {error}", "", RESTORE) from None


def _check_footer(footer: pq.FileMetaData, schema: pa.Schema, max_rows: int, size_bytes: int, where: str) -> None:
    found = footer.schema.to_arrow_schema()
    places = [found.get_field_index(name) for name in schema.names]  # -1 for a name that is absent or ambiguous
    if min(places) < 0 or not pa.schema([found.field(place) for place in places]).equals(schema):
        raise IntegrityError(f"{where} has columns {found.names}", f"expected {schema.names} with their types")
    if footer.num_rows > max_rows:
        raise IntegrityError(f"{where} has {footer.num_rows} rows", f"expected at most {max_rows}, which were counted")
    # Each of our rows has a digest or a key of its own, so even the best compression needs a byte for it.
    if footer.num_rows > size_bytes:
        raise IntegrityError(
            f"{where} claims {footer.num_rows} rows in {size_bytes} bytes", "expected at least one byte a row"
        )
    groups = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
    _check_size(sum(groups), size_bytes, where)


def _check_size(plain_bytes: int, size_bytes: int, where: str) -> None:
    if plain_bytes > _allowed_bytes(size_bytes):
        raise IntegrityError(
            f"{where} would grow from {size_bytes} to {plain_bytes} bytes in memory",
            f"expected at most {_MAX_EXPANSION} times its size",
            "do not use this dataset; find out who wrote it",
        )


def _allowed_bytes(size_bytes: int) -> int:
    return _MAX_EXPANSION * size_bytes + _ALWAYS_ALLOWED_BYTES


def _plain_bytes(column: pa.ChunkedArray) -> int:
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    num_bytes = 0
    for chunk in column.chunks:
        num_bytes += int(_lengths(chunk)[as_numpy(chunk.indices.drop_null())].sum())
    return num_bytes


def _most_plain_bytes(column: pa.ChunkedArray) -> int:
    """As if each row had the longest text."""
    if not pa.types.is_dictionary(column.type):
        return column.nbytes
    return sum(int(_lengths(chunk).max(initial=0)) * len(chunk) for chunk in column.chunks)


def _lengths(chunk: pa.DictionaryArray) -> np.ndarray:
    return as_numpy(pc.binary_length(chunk.dictionary)).astype(np.int64)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return column
    return pa.chunked_array([chunk.dictionary_decode() for chunk in column.chunks], column.type.value_type)
