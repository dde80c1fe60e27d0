"""Reads published shards back as rows and publishes them anew: a new version copies images without decoding them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.row_segments import read_rows
from shardmill.dataset.segment import RESTORE
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.split_index import SplitIndex
from shardmill.errors import IntegrityError
from shardmill.formats.cutting import cut_chunks, cut_shards
from shardmill.formats.rows import RowSchema, StoredRow
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import MASK
from shardmill.values import ImageSample, ShardInfo, SourceImage

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
