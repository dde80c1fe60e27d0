"""The index as readers hold it: columns over the chunks of a split in one format, and a table of its shards.

A rank reads millions of chunks and asks for one at a time: 28 bytes a chunk here were 1,211 as Python values. Whoever
verifies or rewrites shards takes them as values from `shardmill.dataset.index`.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.checksummed import check_relative_path
from shardmill.dataset.index import (
    INDEX_SCHEMA,
    MAX_CHUNK_BYTES,
    MIN_ROW_BYTES,
    check_counts,
    index_table,
    shards_of_table,
)
from shardmill.dataset.segment import read_coded_segment, read_segment
from shardmill.errors import IntegrityError
from shardmill.formats.rows import ByteRange
from shardmill.typed_columns import as_arrow, as_numpy
from shardmill.values import ShardFile, ShardInfo

if TYPE_CHECKING:
    from shardmill.checksummed import ChecksummedFile
    from shardmill.dataset.manifest import Manifest
    from shardmill.storage import Store

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


class ChunkPlace(NamedTuple):
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

    def chunk(self, number: int) -> ChunkPlace:
        """A chunk of the split, by its number in layout order."""
        shard = int(np.searchsorted(self.first_chunk_of_shard, number, side="right")) - 1
        return ChunkPlace(
            shard,
            number - int(self.first_chunk_of_shard[shard]),
            ByteRange(int(self.chunk_starts[number]), int(self.stored_bytes[number])),
            int(self.chunk_rows[number]),
            int(self.chunk_crc32c[number]),
        )

    def shard(self, number: int) -> ShardFile:
        """A shard of the split, by its number in layout order."""
        [row] = self.shards.slice(number, 1).to_pylist()
        return ShardFile(
            split=row["split"],
            format=row["format"],
            path=row["shard"],
            size_bytes=row["shard_bytes"],
            sha256=row["shard_sha256"],
            num_rows=row["shard_rows"],
            footer_start=row["footer_start"],
            footer_bytes=row["footer_bytes"],
            footer_crc32c=row["footer_crc32c"],
            rows_path=row["rows_file"],
            rows_bytes=row["rows_bytes"],
            rows_sha256=row["rows_sha256"],
        )

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
    shards = _plain(table.select(_SHARD_COLUMNS).take(as_arrow(last)))
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


def _plain(table: pa.Table) -> pa.Table:
    """With texts in place of their numbers."""
    return table.cast(pa.schema([_READ.field(name) for name in table.column_names]))
