"""Segments, the Parquet tables behind a manifest: published under their digest, read only within their stated size.

Row segments are those of a shard's rows without their pixels, one beside each shard.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardmill.checksummed import RESTORE, ChecksummedFile, checksum_file, read_checksummed
from shardmill.dataset.statistics import ImageSizes, count_sizes
from shardmill.errors import IntegrityError
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import as_numpy

if TYPE_CHECKING:
    from shardmill.formats.rows import RowSchema, StoredRow
    from shardmill.values import ShardFile


# Ours expand 5 to 50 times; a bomb is a file whose few bytes become gigabytes in memory.
_MAX_EXPANSION, _ALWAYS_ALLOWED_BYTES = 1000, 16_000_000


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


ROWS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("source", pa.string()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
        ("source_etag", pa.string()),
        ("source_sha256", pa.string()),
        ("label", pa.int64()),
        ("row_sha256", pa.binary(32)),
        ("notes", pa.string()),
        ("channel_sums", pa.list_(pa.int64())),
        ("channel_square_sums", pa.list_(pa.int64())),
    ]
)


MAX_KEPT_ROWS = 100_000
"""Of row segments that a run keeps in memory: about 30 MB, and the texts of extra columns."""
_NUM_AT_ONCE = 8

# What the source was when it was read.
SOURCE_COLUMNS = {"source_height": pa.int32(), "source_width": pa.int32(), "source_read_bytes": pa.int64()}
# What the normalized pixels look like (`shardmill.images.look`); null without pixels, the hash also of a plain image.
LOOK_COLUMNS = {"laplacian_square_sum": pa.int64(), "difference_hash": pa.int64()}


def rows_schema(schema: RowSchema) -> pa.Schema:
    """The columns of the row segments of a dataset: sizes only if they differ, extra columns only if there are any."""
    sizes = {"height": pa.int32(), "width": pa.int32()} if schema.one_shape_HWC is None else {}
    extra = {"extra": pa.string()} if schema.has_values else {}
    # What a later listing is compared with, because boxes and masks in `extra` have moved.
    extra |= {"listed_extra": pa.string()} if schema.has_annotations else {}
    return pa.schema(
        [*ROWS_SCHEMA, *(pa.field(*each) for each in (sizes | extra | SOURCE_COLUMNS | LOOK_COLUMNS).items())]
    )


def read_rows(store: Store, shard: ShardFile, schema: RowSchema, columns: Collection[str] | None = None) -> pa.Table:
    """A shard's row segment, with all columns of `rows_schema`, or those of `columns` that are among them.

    Sides and extra columns are not among those of every dataset.
    Raises IntegrityError as `read_segment` does.
    """
    wanted = rows_schema(schema)
    if columns is not None:
        wanted = pa.schema([field for field in wanted if field.name in columns])
    return read_segment(store, rows_file(shard), wanted, shard.num_rows)


class RowReader:
    """Reads the row segments of one run: each of them once, however many checks ask for it, as long as they are few."""

    def __init__(self, store: Store, schema: RowSchema) -> None:
        self.store, self.schema = store, schema
        self._kept: dict[str, pa.Table] = {}
        self._num_kept = 0

    def read(self, shard: ShardFile, columns: Collection[str]) -> pa.Table:
        """Those of `columns` that the rows of a shard have. Raises IntegrityError as `read_segment` does."""
        rows = self._kept.get(shard.rows_path)
        if rows is None:
            if self._num_kept + shard.num_rows > MAX_KEPT_ROWS:
                return read_rows(self.store, shard, self.schema, columns)
            rows = self._kept[shard.rows_path] = read_rows(self.store, shard, self.schema)
            self._num_kept += rows.num_rows
        return rows.select([name for name in rows.column_names if name in columns])

    def read_each(self, shards: Sequence[ShardFile], columns: Collection[str]) -> Iterator[pa.Table]:
        """As `read`, for one shard after the other: reading from an object store is mostly waiting."""
        with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-rows") as pool:
            for first in range(0, len(shards), _NUM_AT_ONCE):
                yield from pool.map(lambda shard: self.read(shard, columns), shards[first : first + _NUM_AT_ONCE])


def sizes_of(rows: pa.Table, image_bytes: int, schema: RowSchema) -> ImageSizes:
    """Return the sizes of one or several row segments; `image_bytes` is the size of their stored images."""
    heights_N, widths_N = _stored_sides(rows, schema)
    columns = {name: rows.column(name).to_numpy() for name in SOURCE_COLUMNS}
    source_bytes = int(columns["source_read_bytes"].sum())
    return ImageSizes(
        source=count_sizes(columns["source_height"], columns["source_width"], source_bytes),
        stored=count_sizes(heights_N, widths_N, image_bytes),
    )


def count_pixels(rows: pa.Table, schema: RowSchema) -> int:
    """Count the pixels of all images of one or several row segments."""
    return int(pixels_of_rows(rows, schema).sum())


def pixels_of_rows(rows: pa.Table, schema: RowSchema) -> np.ndarray:
    """The number of pixels of each stored image: int64, (N,)."""
    heights_N, widths_N = _stored_sides(rows, schema)
    return heights_N * widths_N


def _stored_sides(rows: pa.Table, schema: RowSchema) -> tuple[np.ndarray, np.ndarray]:
    if schema.one_shape_HWC is not None:
        height, width, _ = schema.one_shape_HWC
        return np.full(rows.num_rows, height, np.int64), np.full(rows.num_rows, width, np.int64)
    return rows.column("height").to_numpy().astype(np.int64), rows.column("width").to_numpy().astype(np.int64)


def rows_table(rows: Sequence[StoredRow], schema: RowSchema) -> pa.Table:
    """A shard's rows without their pixels."""
    sources = [row.source for row in rows]
    columns = {
        "sample_id": [source.sample_id for source in sources],
        "source": [source.key for source in sources],
        "source_bytes": [source.size_bytes for source in sources],
        "source_mtime_ns": [source.mtime_ns for source in sources],
        "source_etag": [source.etag for source in sources],
        "source_sha256": [row.sample.source_sha256 for row in rows],
        "label": [row.label_id for row in rows],
        "row_sha256": [row.digest for row in rows],
        "notes": [",".join(row.sample.notes) for row in rows],
        "channel_sums": [row.sample.channel_sums for row in rows],
        "channel_square_sums": [row.sample.channel_square_sums for row in rows],
        "height": [row.sample.height for row in rows],
        "width": [row.sample.width for row in rows],
        "extra": [source.extra for source in sources],
        "listed_extra": [row.listed_extra for row in rows],
        "source_height": [row.sample.source_height for row in rows],
        "source_width": [row.sample.source_width for row in rows],
        "source_read_bytes": [row.sample.source_bytes for row in rows],
        "laplacian_square_sum": [row.sample.laplacian_square_sum for row in rows],
        "difference_hash": [row.sample.difference_hash for row in rows],
    }
    fields = rows_schema(schema)
    return pa.table([pa.array(columns[field.name], field.type) for field in fields], schema=fields)
