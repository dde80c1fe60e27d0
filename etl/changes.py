"""What a source has in common with the version that was made of it last: only the rest has to be processed.

A row is unchanged if its source is listed with equal facts (key, size, times, class, extra columns, named split). The
comparison keeps 25 bytes a row in memory: a 128-bit digest of these facts, its place, and whether it was found.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.listed import LISTED_SCHEMA, ListingBatch
from etl.listing import Listing
from etl.segments import fact_limbs, find_sorted, key_digests
from shardmill.dataset.index import rows_file
from shardmill.dataset.row_segments import rows_schema
from shardmill.dataset.segment import read_segment
from shardmill.formats.rows import RowSchema
from shardmill.storage import Store
from shardmill.values import TRANSIENT_REASONS, Rejection, RejectReason, ShardInfo

_FACTS = ("size_bytes", "mtime_ns", "etag", "label", "extra")


@dataclass(frozen=True, slots=True)
class ShardRows:
    """One shard of the older version in all its formats, and which of its rows are still what the source holds."""

    copies: tuple[ShardInfo, ...]
    is_kept_N: np.ndarray
    """In row order, bool."""

    @property
    def is_whole(self) -> bool:
        return bool(self.is_kept_N.all())


@dataclass(frozen=True, slots=True)
class Changes:
    """How a listing differs from the version before."""

    shards: tuple[ShardRows, ...]
    """All of the older version, in layout order."""
    rejections: tuple[Rejection, ...]
    """Refused before, and listed as they were."""
    num_unchanged: int
    num_removed: int
    """Rows whose source is gone or has changed."""


class Compared:
    """A listing beside the rows of an older version. `list` must be read to its end before `changes` is asked."""

    def __init__(
        self,
        store: Store,
        shards: Sequence[tuple[ShardInfo, ...]],
        schema: RowSchema,
        refused: Sequence[Rejection],
        listing: Listing,
        *,
        is_same_source: bool = True,
    ) -> None:
        """Of another source nothing is taken for unchanged: its equal facts may be those of other files."""
        self.uri = str(listing.folder)
        self._is_same_source = is_same_source
        self._shards = shards
        self._listing = listing
        # A copy is asked again: what it is a copy of may be gone.
        asked_again = TRANSIENT_REASONS | {RejectReason.DUPLICATE_CONTENT}
        known = refused if is_same_source else ()
        self._refused = {each.key: each for each in known if each.stage != "list" and each.reason not in asked_again}
        self._carried: list[Rejection] = []
        digests = [_row_digests(store, copies[0], schema, names_split=listing.has_splits) for copies in shards]
        self._sizes = [len(each) for each in digests]
        digests_N = np.concatenate([np.empty(0, "S16"), *digests])
        self._order_N = np.argsort(digests_N, kind="stable")
        self._digests_N = digests_N[self._order_N]
        self._is_found_N = np.zeros(len(digests_N), bool)

    def list(self) -> Iterator[ListingBatch]:
        """The images that are new or have changed: a listing of their own."""
        for segment in self._listing.segments:
            for batch in pq.ParquetFile(self._listing.folder / segment).iter_batches():
                images = pa.Table.from_batches([batch]).select(LISTED_SCHEMA.names)
                found_N = self._find(_fact_digests(images, names_split=self._listing.has_splits))
                yield ListingBatch(self._without_refused(images.filter(pa.array(~found_N))))

    def changes(self) -> Changes:
        """What is left of the older version."""
        is_kept_N = np.empty(len(self._order_N), bool)
        is_kept_N[self._order_N] = self._is_found_N
        kept = np.split(is_kept_N, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        shards = tuple(ShardRows(copies, each) for copies, each in zip(self._shards, kept, strict=True))
        num_unchanged = int(is_kept_N.sum())
        return Changes(shards, tuple(self._carried), num_unchanged, len(is_kept_N) - num_unchanged)

    def _find(self, digests_N: np.ndarray) -> np.ndarray:
        """Which of these are rows already; marks them."""
        if not self._is_same_source:
            return np.zeros(len(digests_N), bool)
        places_N, found_N = find_sorted(self._digests_N, digests_N)
        self._is_found_N[places_N[found_N]] = True
        return found_N

    def _without_refused(self, images: pa.Table) -> pa.Table:
        """Take out what was refused before for a reason that still holds, since the input is the same."""
        if not self._refused:
            return images
        is_new = []
        for row in images.select(["key", "size_bytes", "mtime_ns", "etag"]).to_pylist():
            refused = self._refused.get(row["key"])
            is_same = refused is not None and (refused.size_bytes, refused.mtime_ns, refused.etag) == (
                row["size_bytes"],
                row["mtime_ns"],
                row["etag"],
            )
            if refused is not None and is_same:
                self._carried.append(refused)
            is_new.append(not is_same)
        return images.filter(pa.array(is_new, pa.bool_()))


def _row_digests(store: Store, shard: ShardInfo, schema: RowSchema, *, names_split: bool) -> np.ndarray:
    """Of the sources of a shard's rows, as `_fact_digests` gives them for a listing."""
    rows = read_segment(store, rows_file(shard), rows_schema(schema), shard.num_rows)
    names = pa.array([*schema.class_names, None], pa.string())
    labels = names.take(pc.fill_null(rows.column("label"), len(schema.class_names)).combine_chunks())
    split, no_extra = (pa.array([text] * rows.num_rows, pa.string()) for text in (shard.split, ""))
    extra = rows.column("extra") if schema.has_values else no_extra
    columns = ("source", "source_bytes", "source_mtime_ns", "source_etag")
    table = pa.table([*(rows.column(name) for name in columns), labels, extra, split], names=["key", *_FACTS, "split"])
    return _fact_digests(table, names_split=names_split)


def _fact_digests(images: pa.Table, *, names_split: bool) -> np.ndarray:
    """The first 16 bytes of each image's digest of key and facts, as `S16`."""
    names = (*_FACTS, "split") if names_split else _FACTS
    limbs_N4 = fact_limbs(key_digests(images), images, names)[:, :4]
    return np.ascontiguousarray(limbs_N4.astype("<u4")).view("S16").ravel()
