"""Writes rows as a published, immutable shard with its row segment and all checksums that readers need; and reads the
rows of one again with all of their facts, to publish them elsewhere.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import google_crc32c

from shardmill.checksummed import RESTORE, checksum_file
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.index import ROWS, SHARDS, SplitIndex
from shardmill.dataset.row_segments import read_rows, rows_table, table_bytes
from shardmill.errors import IntegrityError
from shardmill.failpoints import failpoint
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow, cut_chunks, cut_shards
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import MASK
from shardmill.values import ChunkInfo, ImageSample, ShardInfo, SourceImage


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


Copies = tuple[ShardInfo, ...]
"""The shards that hold the same rows, one of each format."""


def publish_rows(
    store: Store, name: str, rows: Iterable[StoredRow], like: Copies, schema: RowSchema, *, chunk_bytes: int,
    shard_max_bytes: int,
) -> tuple[Copies, ...]:  # fmt: skip
    """New shards with `rows`, in the split and the formats of `like`."""
    attempt = uuid.uuid4().hex[:12]
    return tuple(
        tuple(
            publish_shard(store, each.split, f"{name}-{number:06d}-{attempt}", each.format, chunks, schema=schema)
            for each in like
        )
        for number, chunks in enumerate(cut_shards(cut_chunks(rows, chunk_bytes), shard_max_bytes))
    )


def read_stored_rows(store: Store, shard: ShardInfo, schema: RowSchema) -> Iterator[StoredRow]:
    """Every row of a shard of any format, in its order, with all facts of its row segment; equal to what was published.

    Holds one chunk and the row segment at a time. Raises IntegrityError for any altered byte, and if the segment is of
    other rows than the shard: each row's digest is computed again from its image.
    """
    where = join_uri(store.uri, shard.path)
    records = read_rows(store, shard, schema).to_pylist()
    if len(records) != shard.num_rows:
        raise IntegrityError(f"{shard.rows_path} has {len(records)} rows", f"expected {shard.num_rows}", RESTORE)
    fetcher = ChunkFetcher(store, SplitIndex.of((shard,)), schema)
    position = 0
    for chunk in range(len(shard.chunks)):
        rows = fetcher.read_chunk(chunk)
        masks = rows.extra[MASK] if schema.has_mask else itertools.repeat(b"", len(rows.images))
        for image, mask in zip(rows.images, masks, strict=True):
            row = _stored_row(records[position], bytes(image), schema, where)
            yield replace(row, mask=mask) if schema.has_mask else row
            position += 1


def _stored_row(record: dict[str, Any], image: bytes, schema: RowSchema, where: str) -> StoredRow:
    height, width, _ = schema.one_shape_HWC or (record["height"], record["width"], 0)
    label_id = record["label"]
    if label_id is not None and not 0 <= label_id < len(schema.class_names):
        raise IntegrityError(f"{where} has the label {label_id}", f"expected one of {len(schema.class_names)} classes")
    source = SourceImage(
        key=record["source"],
        size_bytes=record["source_bytes"],
        mtime_ns=record["source_mtime_ns"],
        etag=record["source_etag"],
        label=None if label_id is None else schema.class_names[label_id],
        sample_id=record["sample_id"],
        extra=record.get("extra", ""),
    )
    sample = ImageSample(
        image=image,
        height=height,
        width=width,
        channels=len(record["channel_sums"]),
        source_sha256=record["source_sha256"],
        channel_sums=tuple(record["channel_sums"]),
        channel_square_sums=tuple(record["channel_square_sums"]),
        notes=tuple(record["notes"].split(",")) if record["notes"] else (),
        source_height=record["source_height"],
        source_width=record["source_width"],
        source_bytes=record["source_read_bytes"],
        laplacian_square_sum=record["laplacian_square_sum"],
        difference_hash=record["difference_hash"],
    )
    row = StoredRow.of(source, label_id, sample, record.get("listed_extra", ""))
    if row.digest != record["row_sha256"]:
        raise IntegrityError(
            f"{where} contains a different row than its row segment: {record['source']!r}",
            "expected an image with the recorded digest",
            RESTORE,
        )
    return row
