"""The index, a table with one row per chunk, the shards that it describes, and the layout, the order of their chunks.

A shard's facts repeat on each of its chunks; Parquet's dictionaries store them once. Readers hold the index as columns
over the chunks of a split in one format (`SplitIndex`): a rank reads millions of chunks and asks for one at a time, and
28 bytes a chunk there were 1,211 as Python values. Whoever verifies or rewrites shards takes them as values.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.checksummed import RESTORE, ChecksummedFile, check_relative_path
from shardmill.dataset.row_segments import put_segment, read_coded_segment, read_segment, rows_file
from shardmill.errors import CannotList, IntegrityError
from shardmill.formats.rows import ByteRange
from shardmill.storage import Store, join_uri
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import as_arrow, as_numpy
from shardmill.values import ChunkInfo, ShardFile, ShardInfo

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
            shard = ShardInfo(**_facts_of(record), chunks=tuple(chunks))
            check_relative_path(shard.path)
            check_relative_path(shard.rows_path)
            _check_places(shard)
            shards.append(shard)
            chunks = []
    return shards


def _facts_of(record: dict[str, Any]) -> dict[str, Any]:
    """The fields of a `ShardFile`, from a row of the index."""
    return {
        **{name: record[name] for name in ("split", "format", "footer_start", "footer_bytes", "footer_crc32c")},
        "path": record["shard"],
        "size_bytes": record["shard_bytes"],
        "sha256": record["shard_sha256"],
        "num_rows": record["shard_rows"],
        "rows_path": record["rows_file"],
        **{name: record[name] for name in ("rows_bytes", "rows_sha256")},
    }


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


# Field of `SplitIndex` -> the column of the index, and its type in memory; `_are_places_right` looks that it fits.
_CHUNK_COLUMNS = {
    "chunk_starts": ("chunk_start", np.int64),
    "stored_bytes": ("chunk_bytes", np.int32),
    "chunk_rows": ("chunk_rows", np.int32),
    "image_bytes": ("chunk_image_bytes", np.int32),
    "chunk_crc32c": ("chunk_crc32c", np.uint32),
}
# The digest of a chunk is for `verify` alone, and more than half of the index.
_READ = pa.schema([field for field in INDEX_SCHEMA if field.name != "chunk_sha256"])
_SHARD_COLUMNS = [name for name in _READ.names if not name.startswith("chunk_")]
_NUM_THREADS = 4
_MAX_FILE_BYTES = 1 << 60
# Paths as builds write them; of any other the rule itself decides.
_USUAL_PATH = r"^([A-Za-z0-9_=-][A-Za-z0-9_=.-]*/)*[A-Za-z0-9_=-][A-Za-z0-9_=.-]*$"


class ChunkLocation(NamedTuple):
    """Where a chunk is, and what it must be."""

    shard: int
    """Number of its shard in the split."""
    number: int
    """Its number in that shard."""
    place: ByteRange
    num_rows: int
    crc32c: int


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """The chunks of one split in one format, in layout order, as arrays; and its shards."""

    split: str
    format: str
    chunk_starts: np.ndarray
    """First byte of each chunk in its shard."""
    stored_bytes: np.ndarray
    """Bytes of each chunk in its shard."""
    chunk_rows: np.ndarray
    image_bytes: np.ndarray
    """Bytes of each chunk's images; equal in every format."""
    chunk_crc32c: np.ndarray
    chunks_of_shard: np.ndarray
    """Number of chunks of each shard."""
    shards: pa.Table
    """A row for each shard, with the columns of the index."""

    @classmethod
    def of(cls, shards: Iterable[ShardInfo]) -> SplitIndex:
        """The index of these shards of one split and format."""
        [index] = _parts(index_table(shards).select(_READ.names))
        return _narrowed(index)

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_rows)

    @property
    def num_shards(self) -> int:
        return self.shards.num_rows

    @cached_property
    def first_chunk_of_shard(self) -> np.ndarray:
        """Number of each shard's first chunk."""
        return np.cumsum(self.chunks_of_shard) - self.chunks_of_shard

    @property
    def max_chunk_bytes(self) -> int:
        """Stored image bytes of the largest chunk; equal in every format."""
        return int(self.image_bytes.max(initial=1))

    def chunk(self, number: int) -> ChunkLocation:
        """A chunk of the split, by its number in layout order."""
        shard = int(np.searchsorted(self.first_chunk_of_shard, number, side="right")) - 1
        return ChunkLocation(
            shard,
            number - int(self.first_chunk_of_shard[shard]),
            ByteRange(int(self.chunk_starts[number]), int(self.stored_bytes[number])),
            int(self.chunk_rows[number]),
            int(self.chunk_crc32c[number]),
        )

    def shard(self, number: int) -> ShardFile:
        """A shard of the split, by its number in layout order."""
        [row] = self.shards.slice(number, 1).to_pylist()
        return ShardFile(**_facts_of(row))

    @property
    def paths(self) -> list[str]:
        """Of its shards, in layout order."""
        return self.shards.column("shard").to_pylist()


def read_index(store: Store, manifest: Manifest) -> dict[tuple[str, str], SplitIndex]:
    """The index of a version by split and format, from the verified segments, of which some are read at a time.

    Raises as `read_shards` does, for the same faults.
    """
    num_chunks = sum(split.num_chunks for split in manifest.splits.values()) * len(manifest.formats)
    with ThreadPoolExecutor(_NUM_THREADS, "shardmill-index") as pool:
        read = pool.map(partial(_read_parts, store, max_rows=num_chunks), manifest.index_segments)
        found = {(index.split, index.format): index for index in _join(part for parts in read for part in parts)}
    counts = {
        key: (index.num_shards, index.num_chunks, int(index.chunk_rows.sum()), int(index.image_bytes.sum()))
        for key, index in found.items()
    }
    check_counts(manifest, counts)
    return found


def _read_parts(store: Store, file: ChecksummedFile, max_rows: int) -> list[SplitIndex]:
    """Of one segment. Raises IntegrityError for places that no file can have, as `shards_of_table` does."""
    table = read_coded_segment(store, file, _READ, max_rows)
    has_empty = any(column.null_count for column in table.columns)
    parts = [] if has_empty else list(_parts(table))
    if has_empty or not all(map(_are_places_right, parts)):
        # The slow way names the shard and what is wrong with it.
        shards_of_table(read_segment(store, file, INDEX_SCHEMA, max_rows))
        raise IntegrityError(f"the index segment {file.path} contradicts itself")
    for part in parts:
        for name in ("shard", "rows_file"):
            paths = part.shards.column(name)
            unusual = pc.invert(pc.match_substring_regex(paths, _USUAL_PATH))
            for path in paths.filter(unusual).to_pylist():
                check_relative_path(path)
    return list(map(_narrowed, parts))


def _parts(table: pa.Table) -> Iterator[SplitIndex]:
    """The rows of an index table without nulls, by split and format in the order of their first rows."""
    table = table.unify_dictionaries().combine_chunks()
    path = _codes(table.column("shard"))
    # The last row of each shard tells its facts.
    last = np.flatnonzero(np.append(path[1:] != path[:-1], True)) if len(path) else np.zeros(0, np.int64)
    chunks_of_shard = np.diff(last, prepend=-1)
    # With texts in place of their numbers.
    texts = pa.schema([_READ.field(name) for name in _SHARD_COLUMNS])
    shards = table.select(_SHARD_COLUMNS).take(as_arrow(last)).cast(texts)
    splits, formats = _codes(table.column("split")), _codes(table.column("format"))
    group = splits[last] * (int(formats.max(initial=0)) + 1) + formats[last]
    chunks = {field: as_numpy(table.column(name)) for field, (name, _) in _CHUNK_COLUMNS.items()}
    for key in dict.fromkeys(group.tolist()):
        is_mine = group == key
        mine = np.repeat(is_mine, chunks_of_shard)
        here = shards.take(as_arrow(np.flatnonzero(is_mine)))
        yield SplitIndex(
            here.column("split")[0].as_py(),
            here.column("format")[0].as_py(),
            **{field: values if mine.all() else values[mine] for field, values in chunks.items()},
            chunks_of_shard=chunks_of_shard[is_mine],
            shards=here,
        )


def _join(parts: Iterable[SplitIndex]) -> list[SplitIndex]:
    """One index for each split and format, of its parts in their order."""
    groups: dict[tuple[str, str], list[SplitIndex]] = {}
    for part in parts:
        groups.setdefault((part.split, part.format), []).append(part)
    return [
        SplitIndex(
            split,
            format,
            **{field: np.concatenate([getattr(part, field) for part in mine]) for field in _CHUNK_COLUMNS},
            chunks_of_shard=np.concatenate([part.chunks_of_shard for part in mine]),
            shards=pa.concat_tables([part.shards for part in mine]).combine_chunks(),
        )
        for (split, format), mine in groups.items()
    ]


def _narrowed(part: SplitIndex) -> SplitIndex:
    """With columns as narrow as their values may be."""
    return replace(part, **{field: getattr(part, field).astype(kind) for field, (_, kind) in _CHUNK_COLUMNS.items()})


def _are_places_right(part: SplitIndex) -> bool:
    """Whether `_check_places` of `shardmill.dataset.index` holds for each shard, from the same rules over columns."""
    first = part.first_chunk_of_shard
    starts, sizes, rows, images = part.chunk_starts, part.stored_bytes, part.chunk_rows, part.image_bytes
    total, footer, footer_bytes, shard_rows = (
        as_numpy(part.shards.column(name)) for name in ("shard_bytes", "footer_start", "footer_bytes", "shard_rows")
    )
    # First that no sum of them can overflow.
    for column, limit in (
        (starts, _MAX_FILE_BYTES), (sizes, MAX_CHUNK_BYTES), (rows, MAX_CHUNK_BYTES), (images, MAX_CHUNK_BYTES),
        (footer, _MAX_FILE_BYTES), (footer_bytes, _MAX_FILE_BYTES), (part.chunk_crc32c, (1 << 32) - 1),
    ):  # fmt: skip
        if column.min() < 0 or column.max() > limit:
            return False
    fits = (rows > 0) & (rows * MIN_ROW_BYTES <= sizes) & (images <= sizes)
    stops = starts + sizes
    follows = stops[:-1] == starts[1:]
    follows[first[1:] - 1] = True
    last = first + part.chunks_of_shard - 1
    return bool(
        fits.all()
        and follows.all()
        and (stops[last] == footer).all()
        and (footer + footer_bytes == total).all()
        and (np.add.reduceat(rows, first) == shard_rows).all()
    )


def _codes(column: pa.ChunkedArray) -> np.ndarray:
    """A number for each text of a column."""
    coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    if not len(coded):
        return np.zeros(0, np.int32)
    return as_numpy(coded.combine_chunks().indices)


# Of each split: what says of 100,000 chunks is in memory, and of more in a file.
MAX_IN_MEMORY_BYTES = 8_000_000
_BLOCK_BYTES = 1_000_000


class Layout:
    """Grows by the shards of one format, in layout order; chunks are equal in every format, so any one will do."""

    def __init__(self, shards: Iterable[ShardInfo] = ()) -> None:
        self.num_shards: Counter[str] = Counter()
        """Number of shards of each split."""
        self.num_chunks: Counter[str] = Counter()
        self._texts: dict[str, tempfile.SpooledTemporaryFile[bytes]] = {}
        for shard in shards:
            self.add(shard)

    def add(self, shard: ShardInfo) -> None:
        """Raises StorageError if the disk with the temporary folder is full."""
        with as_storage_error(tempfile.gettempdir()):
            texts = self._texts.get(shard.split)
            if texts is None:
                # Closed, and with it deleted, when this value goes.
                texts = self._texts[shard.split] = tempfile.SpooledTemporaryFile(MAX_IN_MEMORY_BYTES)  # noqa: SIM115
            for chunk in shard.chunks:
                text = json.dumps(f"{chunk.num_rows}:{chunk.image_bytes}:{chunk.content_sha256}")
                texts.write(f"{',' if self.num_chunks[shard.split] else ''}{text}".encode())
                self.num_chunks[shard.split] += 1
        self.num_shards[shard.split] += 1

    def digest(self, content_digest: str, class_names: Sequence[str], classes: Sequence[str]) -> str:
        """The layout digest: over the ordered chunks of each split, and over the label map `class_names`, unless that
        is the `classes` which the content digest covers, numbered in the order of their names.

        It is that of one canonical JSON object, which is never whole in memory.
        """
        numbers = {} if tuple(class_names) == tuple(classes) else {"class_names": list(class_names)}
        rest = json.dumps({"content": content_digest, **numbers}, sort_keys=True, separators=(",", ":"))
        found = hashlib.sha256(b'{"chunks":{')
        with as_storage_error(tempfile.gettempdir()):
            for place, (split, texts) in enumerate(sorted(self._texts.items(), key=lambda each: each[0])):
                found.update(f"{',' if place else ''}{json.dumps(split)}:[".encode())
                texts.seek(0)
                while block := texts.read(_BLOCK_BYTES):
                    found.update(block)
                found.update(b"]")
        found.update(f"}},{rest[1:]}".encode())
        return found.hexdigest()
