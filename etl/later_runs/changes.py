"""Compares a source with the version that was last built from it, so that only the difference is processed.

A row is unchanged if its source is listed with equal facts (key, size, times, class, extra columns, split), and has the
sample id that it has in this listing. With `etl.detect_changes = "content"`, or a column of keys, it is also unchanged
if the task that reads the source finds the bytes of the row, and makes its mask again.

For each older row 25 bytes are in memory: a 128-bit digest of key, size, times, class and extra columns, its place, and
whether it was found. If the source names splits it is 27 bytes; if contents are compared, 56 more, and with masks 88.
Of an older rejection it is 17 bytes, and no key.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.listing.listing import Listing, fact_limbs, find_sorted, key_digests
from etl.listing.splits import split_of_digest
from etl.sources.listed import LISTED_SCHEMA, SPLITS, ListingBatch
from etl.units.units import UnitTask
from shardmill.dataset.build import UnitResult, decode_sample_ids
from shardmill.dataset.index import in_all_formats, read_shards, stored_sizes
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import ROWS_SCHEMA, read_segment, rows_file
from shardmill.formats.rows import RowSchema
from shardmill.ids import key_bytes
from shardmill.row_mapping import RowMapping
from shardmill.storage import Store
from shardmill.typed_columns import MASK, decode_values, encode_values
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, UNKNOWN_SIZE, Rejection, RejectReason, ShardInfo

if TYPE_CHECKING:
    from etl.listing.listing import Listing
    from etl.units.units import UnitTask
    from shardmill.dataset.row_segments import RowReader
    from shardmill.formats.rows import RowSchema
    from shardmill.row_mapping import RowMapping
    from shardmill.values import ShardInfo


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
        num_unchanged = int(self._is_found_N.sum())
        return Changes(
            shards=tuple(ShardRows(copies, each) for copies, each in zip(self._shards, kept, strict=True)),
            refused_before=self._refused,
            num_unchanged=num_unchanged,
            num_removed=len(self._is_found_N) - num_unchanged,
            rows=self._rows if self._num_known else None,
            rereads=self._rereads,
            num_to_compare=self._num_known,
            num_redecoded=self._num_redecoded,
        )

    def _changed(self, images: pa.Table) -> pa.Table:
        """Those that have to be read, with the contents of the rows that they may still be."""
        if not self._rows.compares_content:
            return self._without_same(images)
        # Equal facts of a file of which nothing was listed but its name say nothing of its bytes.
        facts = [images.column(name) for name in ("size_bytes", "mtime_ns", "etag")]
        is_unknown = [pc.equal(each, none) for each, none in zip(facts, (UNKNOWN_SIZE, 0, ""), strict=True)]
        is_named_only_N = functools.reduce(pc.and_, is_unknown).to_numpy() & self._rows.rereads_named
        self._rereads |= bool(is_named_only_N.any())
        changed = self._without_same(images.filter(pa.array(~is_named_only_N)))
        changed = pa.concat_tables([changed, images.filter(pa.array(is_named_only_N))])
        known, known_masks = self._rows.known_sha256s(changed)
        known = pc.if_else(pa.array(self._have_equal_pixels(changed)), known, "")
        self._num_known += pc.sum(pc.not_equal(known, ""), min_count=0).as_py()
        for name, values in (("known_sha256", known), ("known_mask_sha256", known_masks)):
            place = LISTED_SCHEMA.get_field_index(name)
            changed = changed.set_column(place, LISTED_SCHEMA.field(place), values)
        return changed

    def _without_same(self, images: pa.Table) -> pa.Table:
        """Take out images that already are rows, which are marked, and what was refused before for a reason that still
        holds, since the input is the same.
        """
        rows_N, found_N = self._rows.find(images)
        are_equal_N = self._have_equal_pixels(images)
        self._num_redecoded += int((found_N & ~are_equal_N).sum())
        found_N &= are_equal_N
        self._is_found_N[rows_N[found_N]] = True
        images = images.filter(pa.array(~found_N))
        if not len(self._refused):
            return images
        facts = (images.column(name).to_pylist() for name in ("key", "size_bytes", "mtime_ns", "etag"))
        is_refused_N = self._refused.mark(itertools.starmap(_fact_name, zip(*facts, strict=True)))
        return images.filter(pa.array(~is_refused_N))

    def _have_equal_pixels(self, images: pa.Table) -> np.ndarray:
        if self._equal_suffixes is None:
            return np.ones(images.num_rows, bool)
        suffixes = pc.utf8_lower(pc.replace_substring_regex(images.column("key"), r"(?s).*\.", ""))
        return pc.is_in(suffixes, pa.array(sorted(self._equal_suffixes))).to_numpy()


def _fact_name(key: str, size_bytes: int, mtime_ns: int, etag: str) -> str:
    return f"{key}\0{size_bytes}\0{mtime_ns}\0{etag}"


_IDS = pa.schema([ROWS_SCHEMA.field("sample_id")])
_RESTATED = ("size_bytes", "mtime_ns", "etag")


def with_same_content(changes: Changes, work: Listing, results: Sequence[UnitResult]) -> Changes:
    """The changes without those that were none: the size or time of a source changed, and its bytes, once a task has
    read them, equal those of its row. `work` lists what the units of `results` read.

    Such rows stay, and are stated with their new sizes and times: the version that is made next remembers them, so that
    they are not read again. About 50 bytes for each of them are in memory.
    """
    ids_N = np.sort(decode_sample_ids(result.unchanged_ids for result in results))
    if changes.rows is None or not len(ids_N):
        return changes
    # The row of each unchanged image, ascending, and what is listed of it now.
    tables: list[pa.Table] = []
    for segment in work.segments:
        for batch in pq.ParquetFile(work.folder / segment.path).iter_batches():
            _, is_unchanged_N = find_sorted(ids_N, batch.column("sample_id").to_numpy())
            images = pa.Table.from_batches([batch]).filter(pa.array(is_unchanged_N))
            columns = [pa.array(changes.rows.find_renewed(images)[0]), *(images.column(name) for name in _RESTATED)]
            tables.append(pa.table(columns, names=["row", *_RESTATED]))
    restated = pa.concat_tables(tables).sort_by("row")
    rows_N = restated.column("row").to_numpy()
    starts = np.cumsum([0, *(len(shard.is_kept_N) for shard in changes.shards)])
    cuts = np.searchsorted(rows_N, starts)
    shards = list(changes.shards)
    for place, shard in enumerate(changes.shards):
        own = slice(cuts[place], cuts[place + 1])
        own_N, is_kept_N = rows_N[own] - starts[place], shard.is_kept_N.copy()
        if len(own_N):
            is_kept_N[own_N] = True
            part = restated.slice(own.start, len(own_N)).set_column(0, "row", pa.array(own_N))
            shards[place] = replace(shard, is_kept_N=is_kept_N, restated=part)
    return replace(
        changes,
        shards=tuple(shards),
        num_unchanged=changes.num_unchanged + len(rows_N),
        num_removed=changes.num_removed - len(rows_N),
    )


def row_ids(store: Store, version: Manifest) -> Iterator[tuple[ShardInfo, np.ndarray]]:
    """The sample ids of the rows of each shard, in any format whose row segment is there: of lost ones nothing can be
    said. Raises IntegrityError for an altered one.
    """
    shards = read_shards(store, version)
    sizes = stored_sizes(store, [rows_file(shard) for shard in shards])
    for group in in_all_formats(shards):
        shard = next((each for each in group if each.rows_path in sizes), None)
        if shard is not None:
            rows = read_segment(store, rows_file(shard), _IDS, shard.num_rows)
            yield shard, rows.column("sample_id").to_numpy()


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
        self._compares_splits = listing.has_splits
        self.sizes: list[int] = []
        facts, names = [np.empty(0, "S16")], [np.empty(0, "S16")]
        sha256s, mask_sha256s = [np.empty((0, 32), np.uint8)], [np.empty((0, 32), np.uint8)]
        splits, content_splits = [np.empty(0, np.int8)], [np.empty(0, np.int8)]
        needs_digests = self.compares_content or listing.has_splits
        columns = (*_COMPARED_COLUMNS, "source_sha256") if needs_digests else _COMPARED_COLUMNS
        firsts = [copies[0] for copies in shards]
        for shard, rows in zip(firsts, reader.read_each(firsts, columns), strict=True):
            images = _as_listed(rows, schema, task.mapping)
            facts.append(_digests(images, _FACTS))
            self.sizes.append(rows.num_rows)
            digests = rows.column("source_sha256").to_pylist() if needs_digests else []
            if listing.has_splits:
                splits.append(np.full(rows.num_rows, SPLITS.index(shard.split), np.int8))
            if listing.has_splits and listing.has_unnamed_splits:
                places = [SPLITS.index(split_of_digest(each, task.config.split_fractions)) for each in digests]
                content_splits.append(np.array(places, np.int8))
            if self.compares_content:
                names.append(_digests(images, _NAMED))
                sha256s.append(_digest_bytes(digests))
                if schema.has_mask:
                    masks = (str(decode_values(text)[MASK]) for text in rows.column("extra").to_pylist())
                    mask_sha256s.append(_digest_bytes(masks))
        self._facts, self._names = _Sorted(np.concatenate(facts)), _Sorted(np.concatenate(names))
        self._sha256_N32, self._mask_sha256_N32 = np.concatenate(sha256s), np.concatenate(mask_sha256s)
        # As places in `SPLITS`; those by content are empty if the listing names the split of every image.
        self._splits_N, self._content_splits_N = np.concatenate(splits), np.concatenate(content_splits)

    def find(self, images: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """The row of each listed image, and whether there is one with equal facts; if not, its number means nothing."""
        return self._find(self._facts, images, _FACTS)

    def find_renewed(self, images: pa.Table) -> tuple[np.ndarray, np.ndarray]:
        """Like `find`, for any size and time: rows whose sources may have other bytes. For compared contents."""
        return self._find(self._names, images, _NAMED)

    def known_sha256s(self, images: pa.Table) -> tuple[pa.Array, pa.Array]:
        """Return the hex SHA-256 of the sources of rows that `find_renewed` finds, and of the masks that these rows
        store; empty for other images, and without masks.
        """
        rows_N, found_N = self.find_renewed(images)

        def known(sha256_N32: np.ndarray) -> pa.Array:
            texts = np.full(len(images), "", object)
            if len(sha256_N32):
                texts[found_N] = [sha256_N32[row].tobytes().hex() for row in rows_N[found_N]]
            return pa.array(texts, pa.string())

        return known(self._sha256_N32), known(self._mask_sha256_N32)

    def _find(self, digests: _Sorted, images: pa.Table, facts: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
        rows_N, found_N = digests.find(_digests(images, facts))
        if self._compares_splits:
            # Each in the split that its image is listed in: the named one, or that of its content.
            named = images.column("split").filter(pa.array(found_N))
            listed_N = pc.fill_null(pc.index_in(named, pa.array(SPLITS)), -1).to_numpy().astype(np.int8)
            of_N, unnamed_N = rows_N[found_N], listed_N < 0
            if unnamed_N.any():
                listed_N[unnamed_N] = self._content_splits_N[of_N[unnamed_N]]
            found_N[found_N] = self._splits_N[of_N] == listed_N
        return rows_N, found_N


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
        # What the source lists of an image: the values without those of the mapping.
        made = {column.name for column in mapping.columns}
        texts: list[str] = []
        for text in extra.to_pylist():
            listed = {name: value for name, value in decode_values(text).items() if name not in made}
            texts.append(encode_values(listed) if listed else "")
        extra = pa.array(texts, pa.string())
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


_NAME_BYTES = 16


class RefusedBefore:
    """Rejections that are read from their ledger again whenever they are asked for; some of them are marked."""

    def __init__(self, read: Callable[[], Iterable[Rejection]], name_of: Callable[[Rejection], str]) -> None:
        """`name_of`: what a rejection is found by."""
        self._read = read
        digests_N = _name_digests(map(name_of, read()))
        self._order_N = np.argsort(digests_N, kind="stable")
        self._digests_N = digests_N[self._order_N]
        self._is_marked_N = np.zeros(len(digests_N), bool)

    def __len__(self) -> int:
        return len(self._digests_N)

    def mark(self, names: Iterable[str]) -> np.ndarray:
        """Mark those of these names; bool for each name: whether there is one."""
        places_N, found_N = find_sorted(self._digests_N, _name_digests(names))
        self._is_marked_N[self._order_N[places_N[found_N]]] = True
        return found_N

    def marked(self) -> Iterator[Rejection]:
        """Return the rejections marked so far, in the ledger's order."""
        return compress(self._read(), self._is_marked_N.tolist())

    def others(self) -> Iterator[Rejection]:
        """Return the rejections not marked so far, in the ledger's order."""
        return compress(self._read(), (~self._is_marked_N).tolist())


def _name_digests(names: Iterable[str]) -> np.ndarray:
    """The first 16 bytes of each name's SHA-256, as `S16`."""
    joined = bytearray()
    for name in names:
        joined += hashlib.sha256(key_bytes(name)).digest()[:_NAME_BYTES]
    return np.frombuffer(bytes(joined), f"S{_NAME_BYTES}")
