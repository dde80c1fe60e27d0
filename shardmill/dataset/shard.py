"""Rows -> a published, immutable shard with its row segment and every checksum that a reader will ask for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import google_crc32c
import pyarrow as pa

from shardmill.dataset.index import ROWS, SHARDS
from shardmill.dataset.segment import table_bytes
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow
from shardmill.sealed import seal_file
from shardmill.storage import Store, as_storage_error
from shardmill.values import ChunkInfo, ShardInfo

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


def publish_shard(
    store: Store, split: str, name: str, format_name: str, chunks: Sequence[Sequence[StoredRow]], *, schema: RowSchema,
    scratch: Path,
) -> ShardInfo:  # fmt: skip
    """Spool one shard below `scratch`, then publish it and its row segment whole. `name` is unique to the attempt."""
    shard_format = SHARD_FORMATS[format_name]
    file = scratch / f"{name}.{shard_format.suffix}"
    try:
        with as_storage_error(file, sum(row.image_bytes for chunk in chunks for row in chunk)):
            written = shard_format.write_shard(file, chunks, schema)
        data = file.read_bytes()
        path = f"{SHARDS}/{split}/{name}.{shard_format.suffix}"
        store.put_file(path, file)
    finally:
        file.unlink(missing_ok=True)
    rows = [row for chunk in chunks for row in chunk]
    rows_data = table_bytes(rows_table(rows))
    rows_path = f"{ROWS}/{split}/{name}-{format_name}.parquet"
    store.put(rows_path, rows_data)
    shard_seal, rows_seal = seal_file(path, data), seal_file(rows_path, rows_data)
    return ShardInfo(
        split=split,
        format=format_name,
        path=path,
        num_bytes=shard_seal.size_bytes,
        sha256=shard_seal.sha256,
        num_rows=len(rows),
        footer_start=written.footer.start,
        footer_bytes=written.footer.num_bytes,
        footer_crc32c=_crc32c(data, written.footer),
        rows_path=rows_path,
        rows_bytes=rows_seal.size_bytes,
        rows_sha256=rows_seal.sha256,
        chunks=tuple(
            ChunkInfo(
                start=place.start,
                num_bytes=place.num_bytes,
                num_rows=len(chunk),
                image_bytes=sum(row.image_bytes for row in chunk),
                crc32c=_crc32c(data, place),
                content_sha256=chunk_digest(row.digest for row in chunk),
            )
            for place, chunk in zip(written.chunks, chunks, strict=True)
        ),
    )


def rows_table(rows: Sequence[StoredRow]) -> pa.Table:
    """A shard's rows without their pixels."""
    sources = [row.source for row in rows]
    columns = [
        [source.sample_id for source in sources],
        [source.key for source in sources],
        [source.size_bytes for source in sources],
        [source.mtime_ns for source in sources],
        [source.etag for source in sources],
        [row.sample.source_sha256 for row in rows],
        [row.label_id for row in rows],
        [row.digest for row in rows],
        [",".join(row.sample.notes) for row in rows],
        [row.sample.channel_sums for row in rows],
        [row.sample.channel_square_sums for row in rows],
    ]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, ROWS_SCHEMA, strict=True)], schema=ROWS_SCHEMA
    )


def chunk_digest(row_digests: Iterable[bytes]) -> str:
    """SHA-256 over a chunk's row digests in order: what the layout digest is made of, equal in every format."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


def _crc32c(data: bytes, place: ByteRange) -> int:
    return google_crc32c.value(data[place.start : place.start + place.num_bytes])
