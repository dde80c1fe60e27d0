"""Writes rows as a published, immutable shard with its row segment and all checksums that readers need."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence

import google_crc32c

from shardmill.checksummed import checksum_file
from shardmill.dataset.index import ROWS, SHARDS
from shardmill.dataset.row_segments import rows_table
from shardmill.dataset.segment import table_bytes
from shardmill.failpoints import failpoint
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow
from shardmill.storage import Store
from shardmill.values import ChunkInfo, ShardInfo


def publish_shard(
    store: Store, split: str, name: str, format_name: str, chunks: Sequence[Sequence[StoredRow]], *, schema: RowSchema
) -> ShardInfo:
    """Publish one shard and its row segment whole. `name` is unique to the attempt; `shard_max_bytes` bounds what is in
    memory.
    """
    failpoint("shard_open")
    shard_format = SHARD_FORMATS[format_name]
    file = io.BytesIO()
    written = shard_format.write_shard(file, chunks, schema)
    data = file.getvalue()
    path = f"{SHARDS}/{split}/{name}.{shard_format.suffix}"
    store.put(path, data)
    failpoint("shard_mid")
    rows = [row for chunk in chunks for row in chunk]
    rows_data = table_bytes(rows_table(rows, schema))
    rows_path = f"{ROWS}/{split}/{name}-{format_name}.parquet"
    store.put(rows_path, rows_data)
    failpoint("shard_close")
    shard_seal, rows_seal = checksum_file(path, data), checksum_file(rows_path, rows_data)
    return ShardInfo(
        split=split,
        format=format_name,
        path=path,
        size_bytes=shard_seal.size_bytes,
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


def chunk_digest(row_digests: Iterable[bytes]) -> str:
    """SHA-256 over a chunk's row digests in order: what the layout digest is made of, equal in every format."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


def _crc32c(data: bytes, place: ByteRange) -> int:
    return google_crc32c.value(data[place.start : place.start + place.num_bytes])
