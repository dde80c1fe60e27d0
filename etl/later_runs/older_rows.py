"""Finds the rows of an older version that belong to the sources of a new listing.

For each row 25 bytes are in memory: a 128-bit digest of key, size, times, class and extra columns, its place, and
whether it was found. If the source names splits it is 27 bytes; if contents are compared, 56 more, and with masks 88.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.listing.segments import fact_limbs, find_sorted, key_digests
from etl.listing.splits import split_of_digest
from etl.sources.listed import SPLITS
from etl.units.map_rows import listed_values
from shardmill.typed_columns import MASK, decode_values

if TYPE_CHECKING:
    from etl.config import EtlConfig
    from etl.listing.listing import Listing
    from etl.units.units import UnitTask
    from shardmill.dataset.row_segments import RowReader
    from shardmill.formats.rows import RowSchema
    from shardmill.row_mapping import RowMapping
    from shardmill.values import ShardInfo

_NAMED = ("label", "extra")
_FACTS = ("size_bytes", "mtime_ns", "etag", *_NAMED)
# Of a row segment; sums and notes are half of it.
_LISTED = ("source", "source_bytes", "source_mtime_ns", "source_etag")
_COMPARED_COLUMNS = ("sample_id", *_LISTED, "label", "extra", "listed_extra")


class OlderRows:
    """Rows are numbered over all shards, in layout order."""

    def __init__(
        self,
        reader: RowReader,
        shards: Sequence[tuple[ShardInfo, ...]],
        schema: RowSchema,
        listing: Listing,
        task: UnitTask,
    ) -> None:
        """`shards` are those of the older version; the listing says whether splits have to be compared, and the mapping
        of `task` which values no source lists.

        Raises IntegrityError for a missing or altered row segment.
        """
        self.rereads_named = task.config.detect_changes == "content"
        # Of rows that have moved to another file, no size and no time tells whether they are the same.
        self.compares_content = self.rereads_named or task.source.has_key_fields()
        splits = _SplitsBuilder(listing, task.config) if listing.has_splits else None
        self.sizes: list[int] = []
        facts, names = [np.empty(0, "S16")], [np.empty(0, "S16")]
        sha256s, mask_sha256s = [np.empty((0, 32), np.uint8)], [np.empty((0, 32), np.uint8)]
        needs_digests = self.compares_content or listing.has_splits
        columns = (*_COMPARED_COLUMNS, "source_sha256") if needs_digests else _COMPARED_COLUMNS
        firsts = [copies[0] for copies in shards]
        for shard, rows in zip(firsts, reader.read_each(firsts, columns), strict=True):
            images = _as_listed(rows, schema, task.mapping)
            facts.append(_digests(images, _FACTS))
            self.sizes.append(rows.num_rows)
            if splits is not None:
                splits.add(shard.split, rows)
            if self.compares_content:
                names.append(_digests(images, _NAMED))
                sha256s.append(_digest_bytes(rows.column("source_sha256").to_pylist()))
                if schema.has_mask:
                    masks = (str(decode_values(text)[MASK]) for text in rows.column("extra").to_pylist())
                    mask_sha256s.append(_digest_bytes(masks))
        self._facts = _Sorted(np.concatenate(facts))
        self._names = _Sorted(np.concatenate(names))
        self._sha256_N32 = np.concatenate(sha256s)
        self._mask_sha256_N32 = np.concatenate(mask_sha256s)
        self._splits = splits.finish() if splits is not None else None

    def find(self, images: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """The row of each listed image, and whether there is one with equal facts; if not, its number means nothing."""
        return self._find(self._facts, images, _FACTS)

    def find_renewed(self, images: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Like `find`, for any size and time: rows whose sources may have other bytes. For compared contents."""
        return self._find(self._names, images, _NAMED)

    def known_sha256(self, images: pa.Table) -> pa.Array:
        """Return the hex SHA-256 of the sources of rows that `find_renewed` finds; empty for other images."""
        return self._known(self._sha256_N32, images)

    def known_mask_sha256(self, images: pa.Table) -> pa.Array:
        """Like `known_sha256`, of the masks that these rows store; empty without masks."""
        if not len(self._mask_sha256_N32):
            return pa.repeat("", len(images))
        return self._known(self._mask_sha256_N32, images)

    def _known(self, sha256_N32: np.ndarray, images: pa.Table) -> pa.Array:
        rows_N, found_N = self.find_renewed(images)
        known = np.full(len(images), "", object)
        known[found_N] = [sha256_N32[row].tobytes().hex() for row in rows_N[found_N]]
        return pa.array(known, pa.string())

    def _find(self, digests: _Sorted, images: pa.Table, facts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows_N, found_N = digests.find(_digests(images, facts))
        if self._splits is not None:
            found_N[found_N] = self._splits.are_of(rows_N[found_N], images.column("split").filter(pa.array(found_N)))
        return rows_N, found_N


@dataclass(frozen=True, slots=True)
class _Splits:
    """Of each row, as places in `SPLITS`, int8."""

    actual_N: np.ndarray
    of_content_N: np.ndarray
    """Split by content of each row; empty if the listing names the split of every image."""

    def are_of(self, rows_N: np.ndarray, named: pa.ChunkedArray) -> np.ndarray:
        """Whether each row is in the split that its image is listed in: the named one, or that of its content."""
        listed_N = pc.fill_null(pc.index_in(named, pa.array(SPLITS)), -1).to_numpy().astype(np.int8)
        unnamed_N = listed_N < 0
        if unnamed_N.any():
            listed_N[unnamed_N] = self.of_content_N[rows_N[unnamed_N]]
        return self.actual_N[rows_N] == listed_N


class _SplitsBuilder:
    def __init__(self, listing: Listing, config: EtlConfig) -> None:
        self._has_unnamed = listing.has_unnamed_splits
        self._fractions = config.split_fractions
        self._actual = [np.empty(0, np.int8)]
        self._of_content = [np.empty(0, np.int8)]

    def add(self, split: str, rows: pa.Table) -> None:
        self._actual.append(np.full(rows.num_rows, SPLITS.index(split), np.int8))
        if self._has_unnamed:
            sha256s = rows.column("source_sha256").to_pylist()
            places = [SPLITS.index(split_of_digest(sha256, self._fractions)) for sha256 in sha256s]
            self._of_content.append(np.array(places, np.int8))

    def finish(self) -> _Splits:
        return _Splits(np.concatenate(self._actual), np.concatenate(self._of_content))


class _Sorted:
    """Digests in ascending order, and where each of them stood."""

    def __init__(self, digests_N: np.ndarray) -> None:
        self._rows_N = np.argsort(digests_N, kind="stable")
        self._digests_N = digests_N[self._rows_N]

    def find(self, wanted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        places_N, found_N = find_sorted(self._digests_N, wanted_N)
        return self._rows_N[places_N] if len(self._rows_N) else places_N, found_N


def _as_listed(rows: pa.Table, schema: RowSchema, mapping: RowMapping | None) -> pa.Table:
    """Return the listed facts of the rows' sources, except their splits."""
    names = pa.array([*schema.class_names, None], pa.string())
    labels = names.take(pc.fill_null(rows.column("label"), len(schema.class_names)).combine_chunks())
    values = "listed_extra" if schema.has_annotations else "extra"
    extra = rows.column(values) if schema.has_values else pa.array([""] * rows.num_rows, pa.string())
    if mapping is not None:
        extra = pa.array([listed_values(text, mapping) for text in extra.to_pylist()], pa.string())
    columns = [rows.column(name) for name in _LISTED]
    # An id that another image had taken is a fact: without that image it is another one.
    return pa.table([*columns, labels, extra, rows.column("sample_id")], names=["key", *_FACTS, "sample_id"])


def _digest_bytes(sha256s: Iterable[str]) -> np.ndarray:
    """Hex digests as uint8, (N, 32)."""
    return np.frombuffer(bytes.fromhex("".join(sha256s)), np.uint8).reshape(-1, 32)


def _digests(images: pa.Table, facts: tuple[str, ...]) -> np.ndarray:
    """The first 16 bytes of each image's digest of key and facts, as `S16`."""
    limbs_N4 = fact_limbs(key_digests(images), images, facts)[:, :4]
    return np.ascontiguousarray(limbs_N4.astype("<u4")).view("S16").ravel()
