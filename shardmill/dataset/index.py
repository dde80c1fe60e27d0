"""Index, row and ledger segments: the Parquet tables behind a manifest, as plain columns.

Index: one row per chunk; its shard's own facts repeat on each of the shard's rows, where Parquet's dictionaries
store them once.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.dataset.manifest import FileRef
from shardmill.errors import IntegrityError
from shardmill.formats.rows import StoredRow, WrittenShard
from shardmill.storage import Store, check_relative_path, join_uri
from shardmill.values import ChunkInfo, Rejection, RejectReason, ShardInfo

INDEX_SCHEMA = pa.schema(
    [
        ("split", pa.string()),
        ("format", pa.string()),
        ("shard", pa.string()),
        ("chunk_start", pa.int64()),
        ("chunk_bytes", pa.int64()),
        ("chunk_rows", pa.int64()),
        ("chunk_image_bytes", pa.int64()),
        ("chunk_crc32c", pa.int64()),
        ("chunk_sha256", pa.string()),
        ("shard_bytes", pa.int64()),
        ("shard_sha256", pa.string()),
        ("shard_rows", pa.int64()),
        ("footer_start", pa.int64()),
        ("footer_bytes", pa.int64()),
        ("footer_crc32c", pa.int64()),
        ("rows_file", pa.string()),
        ("rows_bytes", pa.int64()),
        ("rows_sha256", pa.string()),
    ]
)

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
        ("record_start", pa.int64()),
        ("record_bytes", pa.int64()),
    ]
)

LEDGER_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("source_base64", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("stage", pa.string()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
        ("source_etag", pa.string()),
        ("source_sha256", pa.string()),
    ]
)


@dataclass(frozen=True)
class SplitIndex:
    """The chunks of one split in one format, in layout order, as arrays; and their shards."""

    split: str
    format: str
    shards: tuple[ShardInfo, ...]

    @cached_property
    def chunks(self) -> tuple[ChunkInfo, ...]:
        """Every chunk, in layout order."""
        return tuple(chunk for shard in self.shards for chunk in shard.chunks)

    @cached_property
    def chunk_rows(self) -> np.ndarray:
        """Rows of each chunk, int64."""
        return np.array([chunk.num_rows for chunk in self.chunks], dtype=np.int64)

    @cached_property
    def shard_of_chunk(self) -> np.ndarray:
        """Position in `shards` of each chunk's shard."""
        return np.repeat(np.arange(len(self.shards)), [len(shard.chunks) for shard in self.shards])

    @cached_property
    def first_chunk_of_shard(self) -> np.ndarray:
        """Number of each shard's first chunk."""
        counts = [len(shard.chunks) for shard in self.shards]
        return np.cumsum([0, *counts])[:-1]

    @property
    def max_chunk_bytes(self) -> int:
        """Stored image bytes of the largest chunk; equal in every format."""
        return max((chunk.image_bytes for chunk in self.chunks), default=1)


def index_table(shards: Iterable[ShardInfo]) -> pa.Table:
    """One row per chunk, in the order of `shards`."""
    records = [
        (
            *(shard.split, shard.format, shard.path),
            *(chunk.start, chunk.num_bytes, chunk.num_rows, chunk.image_bytes, chunk.crc32c, chunk.content_sha256),
            *(shard.num_bytes, shard.sha256, shard.num_rows),
            *(shard.footer_start, shard.footer_bytes, shard.footer_crc32c),
            *(shard.rows_path, shard.rows_bytes, shard.rows_sha256),
        )
        for shard in shards
        for chunk in shard.chunks
    ]
    columns = list(zip(*records, strict=True)) or [() for _ in INDEX_SCHEMA]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, INDEX_SCHEMA, strict=True)], schema=INDEX_SCHEMA
    )


def shards_of_table(table: pa.Table) -> list[ShardInfo]:
    """The shards of an index table, in its order. Raises SecurityRefusal for a path that leaves the root."""
    shards: list[ShardInfo] = []
    chunks: list[ChunkInfo] = []
    records = table.to_pylist()
    for place, record in enumerate(records):
        chunks.append(
            ChunkInfo(
                record["chunk_start"],
                record["chunk_bytes"],
                record["chunk_rows"],
                record["chunk_image_bytes"],
                record["chunk_crc32c"],
                record["chunk_sha256"],
            )
        )
        if place + 1 == len(records) or records[place + 1]["shard"] != record["shard"]:
            shards.append(
                ShardInfo(
                    split=record["split"],
                    format=record["format"],
                    path=check_relative_path(record["shard"]),
                    num_bytes=record["shard_bytes"],
                    sha256=record["shard_sha256"],
                    num_rows=record["shard_rows"],
                    footer_start=record["footer_start"],
                    footer_bytes=record["footer_bytes"],
                    footer_crc32c=record["footer_crc32c"],
                    rows_path=check_relative_path(record["rows_file"]),
                    rows_bytes=record["rows_bytes"],
                    rows_sha256=record["rows_sha256"],
                    chunks=tuple(chunks),
                )
            )
            chunks = []
    return shards


def rows_table(rows: Sequence[StoredRow], written: WrittenShard) -> pa.Table:
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
        [record.start for record in written.records],
        [record.num_bytes for record in written.records],
    ]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, ROWS_SCHEMA, strict=True)], schema=ROWS_SCHEMA
    )


def ledger_table(rejections: Iterable[Rejection]) -> pa.Table:
    """The rejects ledger; a key that is not UTF-8 is base64 in a column of its own."""
    records = [(*_ledger_key(rejection.key), rejection) for rejection in rejections]
    columns = [
        [text for text, _, _ in records],
        [encoded for _, encoded, _ in records],
        *(
            [getattr(rejection, name) for _, _, rejection in records]
            for name in ("reason", "detail", "stage", "size_bytes", "mtime_ns", "etag", "source_sha256")
        ),
    ]
    columns[2] = [str(reason) for reason in columns[2]]
    # A detail may quote a name that is not UTF-8, such as a link's target.
    columns[3] = [detail.encode("utf-8", "backslashreplace").decode() for detail in columns[3]]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, LEDGER_SCHEMA, strict=True)],
        schema=LEDGER_SCHEMA,
    )


def rejections_of_table(table: pa.Table) -> list[Rejection]:
    """The rejections of a ledger table, in its order."""
    return [
        Rejection(
            key=record["source"]
            if record["source"] is not None
            else base64.b64decode(record["source_base64"]).decode("utf-8", "surrogateescape"),
            reason=RejectReason(record["reason"]),
            detail=record["detail"],
            size_bytes=record["source_bytes"],
            mtime_ns=record["source_mtime_ns"],
            etag=record["source_etag"],
            source_sha256=record["source_sha256"],
            stage=record["stage"],
        )
        for record in table.to_pylist()
    ]


def table_bytes(table: pa.Table) -> bytes:
    """A segment's file."""
    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd")
    return out.getvalue()


def put_segment(store: Store, folder: str, table: pa.Table) -> FileRef:
    """Publish a table under a name that follows from its content."""
    data = table_bytes(table)
    digest = hashlib.sha256(data).hexdigest()
    path = f"{folder}/{digest[:32]}.parquet"
    store.put(path, data)
    return FileRef(path=path, num_bytes=len(data), sha256=digest)


def read_segment(store: Store, file: FileRef, schema: pa.Schema) -> pa.Table:
    """A verified segment. Raises IntegrityError where it is missing, altered or of another schema."""
    data = read_verified(store, file)
    try:
        table = pq.read_table(io.BytesIO(data))
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"{join_uri(store.uri, file.path)} does not parse: {error}") from None
    if table.schema.names != schema.names:
        raise IntegrityError(
            f"{join_uri(store.uri, file.path)} has columns {table.schema.names}", f"expected {schema.names}"
        )
    return table


def read_verified(store: Store, file: FileRef) -> bytes:
    """A file that must have the stated size and SHA-256. Raises IntegrityError naming it otherwise."""
    where = join_uri(store.uri, check_relative_path(file.path))
    found = store.stat(file.path)
    if found is None:
        raise IntegrityError(f"{where} is missing", f"expected {file.num_bytes} bytes", RESTORE)
    if found.size_bytes != file.num_bytes:
        raise IntegrityError(f"{where} has {found.size_bytes} bytes", f"expected {file.num_bytes}", RESTORE)
    data = store.read(file.path)
    digest = hashlib.sha256(data).hexdigest()
    if digest != file.sha256:
        raise IntegrityError(f"{where} was altered: SHA-256 {digest}", f"expected {file.sha256}", RESTORE)
    return data


RESTORE = "restore it from a copy, or delete it and run `shardmill etl`, which rebuilds what is missing"


def _ledger_key(key: str) -> tuple[str | None, str | None]:
    try:
        key.encode()
    except UnicodeEncodeError:
        return None, base64.b64encode(key.encode("utf-8", "surrogateescape")).decode()
    return key, None
