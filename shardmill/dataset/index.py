"""The index, a table with one row per chunk, and the shards that it describes.

A shard's facts repeat on each of its chunks; Parquet's dictionaries store them once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from shardmill.checksummed import ChecksummedFile, check_relative_path
from shardmill.dataset.segment import RESTORE, put_segment, read_segment, rows_file
from shardmill.errors import CannotList, IntegrityError
from shardmill.storage import Store, join_uri
from shardmill.values import ChunkInfo, ShardInfo

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest

# Two folders, so that a tool that is given the folder of a split's shards finds images alone.
SHARDS, ROWS = "shards", "rows"
INDEXES = "indexes"
# A request that lists a thousand files takes as long as asking for 50 of them, 8 at a time.
_LISTED_PER_FILE, _NUM_AT_ONCE = 20, 8
# Of an index segment: about 60 MB while it is written or read.
SEGMENT_CHUNKS = 50_000

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

# In every format a row holds the SHA-256 of its source as 64 characters; Parquet's pages end at 2 GiB.
MIN_ROW_BYTES, MAX_CHUNK_BYTES = 64, (1 << 31) - 1


def index_table(shards: Iterable[ShardInfo]) -> pa.Table:
    """One row per chunk, in the order of `shards`."""
    records = [
        (
            *(shard.split, shard.format, shard.path),
            *(chunk.start, chunk.num_bytes, chunk.num_rows, chunk.image_bytes, chunk.crc32c, chunk.content_sha256),
            *(shard.size_bytes, shard.sha256, shard.num_rows),
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


def write_index(store: Store, shards: Iterable[ShardInfo]) -> tuple[ChecksummedFile, ...]:
    """Publish the index in segments of whole shards, one of which is in memory as a table at a time."""
    segments: list[ChecksummedFile] = []
    waiting: list[ShardInfo] = []
    num_chunks = 0
    for shard in shards:
        if waiting and num_chunks + len(shard.chunks) > SEGMENT_CHUNKS:
            segments.append(put_segment(store, INDEXES, index_table(waiting)))
            waiting, num_chunks = [], 0
        waiting.append(shard)
        num_chunks += len(shard.chunks)
    return (*segments, put_segment(store, INDEXES, index_table(waiting)))


def shards_of_table(table: pa.Table) -> list[ShardInfo]:
    """The shards of an index table, in its order.

    Raises IntegrityError for places that no file can have, SecurityRefusal for a path that leaves the root.
    """
    if any(column.null_count for column in table.columns):
        raise IntegrityError("an index segment has empty fields", "expected every chunk and shard described in full")
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
            shard = ShardInfo(
                split=record["split"],
                format=record["format"],
                path=check_relative_path(record["shard"]),
                size_bytes=record["shard_bytes"],
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
            _check_places(shard)
            shards.append(shard)
            chunks = []
    return shards


def shard_file(shard: ShardInfo) -> ChecksummedFile:
    """The shard file, with the size and digest of its index."""
    return ChecksummedFile(shard.path, shard.size_bytes, shard.sha256)


def _check_places(shard: ShardInfo) -> None:
    """Raise IntegrityError unless chunks and footer fill the file without gaps, and rows have room in their chunks.

    Readers allocate what the index says, so every size in it must be bounded by the size of a file.
    """
    position = shard.chunks[0].start
    if position < 0:
        raise IntegrityError(f"{shard.path} has a chunk at byte {position}", "expected a place inside the file")
    for chunk in shard.chunks:
        if chunk.start != position:
            raise IntegrityError(f"{shard.path} has a gap before byte {chunk.start}", f"expected byte {position}")
        fits = 0 < chunk.num_rows * MIN_ROW_BYTES <= chunk.num_bytes <= MAX_CHUNK_BYTES
        if not fits or not 0 <= chunk.image_bytes <= chunk.num_bytes:
            raise IntegrityError(
                f"{shard.path} has a chunk of {chunk.num_rows} rows, {chunk.num_bytes} bytes at byte {chunk.start}",
                f"expected at least {MIN_ROW_BYTES} bytes a row and at most {MAX_CHUNK_BYTES} a chunk",
            )
        position += chunk.num_bytes
    if position != shard.footer_start or shard.footer_bytes < 0 or position + shard.footer_bytes != shard.size_bytes:
        raise IntegrityError(f"{shard.path} has bytes that neither a chunk nor the footer covers")
    rows = sum(chunk.num_rows for chunk in shard.chunks)
    if rows != shard.num_rows:
        raise IntegrityError(f"{shard.path} has {rows} rows in chunks", f"expected {shard.num_rows}, its own count")


def in_all_formats(shards: Iterable[ShardInfo]) -> list[tuple[ShardInfo, ...]]:
    """The shards that hold the same rows, one of each format, in layout order."""
    num_seen: Counter[tuple[str, str]] = Counter()
    groups: dict[tuple[str, int], list[ShardInfo]] = {}
    for shard in shards:
        place = num_seen[shard.split, shard.format]
        num_seen[shard.split, shard.format] += 1
        groups.setdefault((shard.split, place), []).append(shard)
    return [tuple(group) for group in groups.values()]


def read_shards(store: Store, manifest: Manifest) -> tuple[ShardInfo, ...]:
    """Every shard of a version in layout order, all formats, from the verified index segments.

    Raises IntegrityError for an index that is missing, altered, or not what the manifest counts.
    """
    num_chunks = sum(split.num_chunks for split in manifest.splits.values()) * len(manifest.formats)
    shards = tuple(
        shard
        for segment in manifest.index_segments
        for shard in shards_of_table(read_segment(store, segment, INDEX_SCHEMA, num_chunks))
    )
    _check_totals(manifest, shards)
    return shards


def files_of(shards: Iterable[ShardInfo]) -> list[ChecksummedFile]:
    """The shards and their row segments."""
    return [file for shard in shards for file in (shard_file(shard), rows_file(shard))]


def stored_sizes(store: Store, expected: Sequence[ChecksummedFile]) -> dict[str, int]:
    """The sizes of those of the expected files that are there, by path.

    A listing finds a thousand with one request, but lists the files of all other versions as well: so only a part of it
    is read if there are many of those, and the other files are asked for one by one.
    """
    missing = {file.path for file in expected}
    sizes: dict[str, int] = {}
    for folder in sorted({path.partition("/")[0] for path in missing}):
        with suppress(CannotList):
            for file in itertools.islice(store.list(folder), _LISTED_PER_FILE * len(expected)):
                if file.path in missing:
                    missing.remove(file.path)
                    sizes[file.path] = file.size_bytes
    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-sizes") as pool:
        return sizes | {file.path: file.size_bytes for file in pool.map(store.stat, missing) if file is not None}


def check_files(store: Store, expected: Sequence[ChecksummedFile]) -> int:
    """The bytes of all these files. Raises IntegrityError for one that is missing or cut."""
    found = stored_sizes(store, expected)
    for file in expected:
        where = join_uri(store.uri, file.path)
        if file.path not in found:
            raise IntegrityError(f"shard {where} is missing", f"expected {file.size_bytes} bytes", RESTORE)
        if found[file.path] != file.size_bytes:
            raise IntegrityError(f"{where} has {found[file.path]} bytes", f"expected {file.size_bytes}", RESTORE)
    return sum(file.size_bytes for file in expected)


def has_all_files(store: Store, manifest: Manifest) -> bool:
    """Whether every file of a version is there with its size: a version that lost one is no reason to skip a build."""
    try:
        check_files(store, files_of(read_shards(store, manifest)))
    except IntegrityError:
        return False
    return True


def intact_shards(store: Store, manifest: Manifest) -> list[tuple[ShardInfo, ...]]:
    """The shards of which no file is lost or cut, in all formats."""
    shards = read_shards(store, manifest)
    sizes = stored_sizes(store, files_of(shards))
    groups = in_all_formats(shards)
    return [group for group in groups if all(sizes.get(each.path) == each.size_bytes for each in files_of(group))]


def _check_totals(manifest: Manifest, shards: tuple[ShardInfo, ...]) -> None:
    found: dict[tuple[str, str], list[ShardInfo]] = {}
    for shard in shards:
        found.setdefault((shard.split, shard.format), []).append(shard)
    counts = {
        key: (
            len(mine),
            sum(len(shard.chunks) for shard in mine),
            sum(shard.num_rows for shard in mine),
            sum(chunk.image_bytes for shard in mine for chunk in shard.chunks),
        )
        for key, mine in found.items()
    }
    check_counts(manifest, counts)


def check_counts(manifest: Manifest, counts: Mapping[tuple[str, str], tuple[int, int, int, int]]) -> None:
    """Raise IntegrityError unless the index holds what the manifest counted, split by split in each format.

    `counts`: shards, chunks, rows and image bytes.
    """
    expected = {(split, name) for split in manifest.splits for name in manifest.formats}
    if set(counts) != expected:
        raise IntegrityError(f"the index holds {sorted(counts)}", f"the manifest counts {sorted(expected)}")
    for (split, name), actual in counts.items():
        info = manifest.splits[split]
        counted = (info.num_shards, info.num_chunks, info.num_rows, info.image_bytes)
        if actual != counted:
            raise IntegrityError(
                f"the index of split {split} ({name}) has shards, chunks, rows and image bytes {actual}",
                f"the manifest counts {counted}",
            )
