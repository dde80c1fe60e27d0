"""Compares a source with the version that was last built from it, so that only the difference is processed.

A row is unchanged if its source is listed with equal facts (key, size, times, class, extra columns, split), and has the
sample id that it has in this listing. With
`etl.detect_changes = "content"`, or a column of keys, it is also unchanged if the task that reads the source finds the
bytes of the row, and makes its mask again.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.later_runs.older_rows import OlderRows
from etl.later_runs.refused_before import RefusedBefore
from etl.listing.listing import Listing
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, UNKNOWN_SIZE, Rejection, RejectReason, ShardInfo


@dataclass(frozen=True, slots=True)
class ShardRows:
    """One shard of the older version in all its formats, and which of its rows are still what the source holds."""

    copies: tuple[ShardInfo, ...]
    is_kept_N: np.ndarray
    """Whether each row is kept, in row order, bool."""
    restated: pa.Table | None = None
    """Kept rows whose sources are listed with another size or time now: `row`, `size_bytes`, `mtime_ns`, `etag`."""

    @property
    def is_whole(self) -> bool:
        return bool(self.is_kept_N.all())


@dataclass(frozen=True, slots=True)
class Changes:
    """The differences between a listing and the previous version."""

    shards: tuple[ShardRows, ...]
    """All of the older version, in layout order."""
    refused_before: RefusedBefore
    """Earlier rejections; marked ones are listed unchanged."""
    num_unchanged: int
    num_removed: int
    """Rows whose source is gone or has changed."""
    rows: OlderRows | None = None
    """The older version's, if there are contents to compare."""
    rereads: bool = False
    """Whether the next run has to read the same inputs again: their contents count, and no listing shows them."""
    num_to_compare: int = 0
    """Number of removed rows whose inputs may still have the same bytes."""
    num_redecoded: int = 0
    """Number of removed rows whose inputs are unchanged, but may be decoded to other pixels now."""

    @property
    def may_keep_rows(self) -> bool:
        """Whether a row of the older version may be reused in the new one, as far as is known before anything
        is read.
        """
        return self.num_unchanged > 0 or self.rows is not None


class Compared:
    """A listing beside the rows of an older version. `list` must be read to its end before `changes` is asked."""

    def __init__(
        self,
        shards: Sequence[tuple[ShardInfo, ...]],
        rows: OlderRows,
        refused: Callable[[], Iterable[Rejection]],
        listing: Listing,
        *,
        is_same_source: bool = True,
        equal_suffixes: frozenset[str] | None = None,
    ) -> None:
        """Of another source nothing is taken for unchanged: its equal facts may be those of other files.

        `equal_suffixes`: what names end with of which the rows have the pixels that they would have now; None for all.
        """
        self.uri = str(listing.folder)
        self._is_same_source, self._equal_suffixes, self._num_redecoded = is_same_source, equal_suffixes, 0
        self._shards = shards
        self._rows = rows
        self._listing = listing
        # A copy is asked again: what it is a copy of may be gone.
        asked_again = TRANSIENT_REASONS | ANNOTATION_REASONS | {RejectReason.DUPLICATE_CONTENT}
        self._refused = RefusedBefore(
            lambda: (each for each in refused() if each.stage != "list" and each.reason not in asked_again),
            lambda each: _fact_name(each.key, each.size_bytes, each.mtime_ns, each.etag),
        )
        self._num_known, self._rereads = 0, False
        self._is_found_N = np.zeros(sum(rows.sizes), bool)

    def list(self) -> Iterator[ListingBatch]:
        """The images that are new or have changed: a listing of their own."""
        for segment in self._listing.segments:
            for batch in pq.ParquetFile(self._listing.folder / segment.path).iter_batches():
                images = pa.Table.from_batches([batch]).select([*LISTED_SCHEMA.names, "sample_id"])
                listed = self._changed(images) if self._is_same_source else images
                # A part of them would not tell which ones have the ids of others.
                ids_N = listed.column("sample_id").to_numpy()
                yield ListingBatch(listed.select(LISTED_SCHEMA.names), ids_N=ids_N)

    def changes(self) -> Changes:
        """The rows that remain of the older version."""
        kept = np.split(self._is_found_N, np.cumsum(self._rows.sizes)[:-1]) if self._rows.sizes else []
        shards = tuple(ShardRows(copies, each) for copies, each in zip(self._shards, kept, strict=True))
        num_unchanged = int(self._is_found_N.sum())
        num_removed = len(self._is_found_N) - num_unchanged
        rows = self._rows if self._num_known else None
        return Changes(
            shards, self._refused, num_unchanged, num_removed, rows, self._rereads, self._num_known, self._num_redecoded
        )

    def _changed(self, images: pa.Table) -> pa.Table:
        """Those that have to be read, with the contents of the rows that they may still be."""
        if not self._rows.compares_content:
            return self._without_same(images)
        # Equal facts of a file of which nothing was listed but its name say nothing of its bytes.
        is_named_only_N = _are_named_only(images) & self._rows.rereads_named
        self._rereads |= bool(is_named_only_N.any())
        changed = self._without_same(images.filter(pa.array(~is_named_only_N)))
        return self._with_known(pa.concat_tables([changed, images.filter(pa.array(is_named_only_N))]))

    def _without_same(self, images: pa.Table) -> pa.Table:
        return self._without_refused(images.filter(pa.array(~self._find(images))))

    def _find(self, images: pa.Table) -> np.ndarray:
        """Find images that already are rows, and mark the rows."""
        rows_N, found_N = self._rows.find(images)
        are_equal_N = self._have_equal_pixels(images)
        self._num_redecoded += int((found_N & ~are_equal_N).sum())
        found_N &= are_equal_N
        self._is_found_N[rows_N[found_N]] = True
        return found_N

    def _have_equal_pixels(self, images: pa.Table) -> np.ndarray:
        if self._equal_suffixes is None:
            return np.ones(images.num_rows, bool)
        suffixes = pc.utf8_lower(pc.replace_substring_regex(images.column("key"), r"(?s).*\.", ""))
        return pc.is_in(suffixes, pa.array(sorted(self._equal_suffixes))).to_numpy()

    def _with_known(self, images: pa.Table) -> pa.Table:
        known = self._rows.known_sha256(images)
        known = pc.if_else(pa.array(self._have_equal_pixels(images)), known, "")
        self._num_known += pc.sum(pc.not_equal(known, ""), min_count=0).as_py()
        for name, values in (("known_sha256", known), ("known_mask_sha256", self._rows.known_mask_sha256(images))):
            place = LISTED_SCHEMA.get_field_index(name)
            images = images.set_column(place, LISTED_SCHEMA.field(place), values)
        return images

    def _without_refused(self, images: pa.Table) -> pa.Table:
        """Take out what was refused before for a reason that still holds, since the input is the same."""
        if not len(self._refused):
            return images
        facts = (images.column(name).to_pylist() for name in ("key", "size_bytes", "mtime_ns", "etag"))
        is_refused_N = self._refused.mark(itertools.starmap(_fact_name, zip(*facts, strict=True)))
        return images.filter(pa.array(~is_refused_N))


def _fact_name(key: str, size_bytes: int, mtime_ns: int, etag: str) -> str:
    return f"{key}\0{size_bytes}\0{mtime_ns}\0{etag}"


def _are_named_only(images: pa.Table) -> np.ndarray:
    is_unknown = pc.and_(pc.equal(images.column("size_bytes"), UNKNOWN_SIZE), pc.equal(images.column("mtime_ns"), 0))
    return pc.and_(is_unknown, pc.equal(images.column("etag"), "")).to_numpy()
