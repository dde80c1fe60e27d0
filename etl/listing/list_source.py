"""Converts a source's batches to a `Listing`: images stream into segments on disk, and only sums stay in memory.

The segments are ordered by ranges of cells, so that a work unit reads only its own images. A build fails here if its
source has no image at all, or no labels although it has some. Sample ids are made unique: a key that is listed twice is
rejected once, and two keys with one id get two ids; both are asked of an engine's group-by.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import heapq
import io
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.listing.grouping import Group, GroupBy, Segment, SpilledRows, group_here, with_equals
from etl.listing.listing import (
    NUM_BUCKETS,
    SEGMENT_ROWS,
    SEGMENT_SCHEMA,
    Listing,
    ListingSegment,
    fact_limbs,
    find_sorted,
    key_digests,
    limbs,
    sample_ids,
    sum_limbs,
    write_rows,
    write_segment,
)
from etl.sources import Lists
from etl.sources.listed import ListingBatch
from etl.sources.names import MAX_CLASS_NAME_BYTES, is_class_name
from shardmill.checksummed import checksum_file
from shardmill.dataset.ledger import RejectionLog
from shardmill.errors import StorageError, UsageError
from shardmill.failpoints import failpoint
from shardmill.ids import add_digests, format_digest, key_hash, next_sample_id, sample_id_of
from shardmill.jobs.observer import Observer
from shardmill.jobs.process import Scratch, scratch_folder
from shardmill.mix import mix64_array
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import BOXES, LABEL, names_of
from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, Rejection, RejectReason
from shardmill.words import printable

if TYPE_CHECKING:
    from shardmill.dataset.ledger import RejectionLog


_BUCKET_SHIFT = np.uint64(48)
_NUM_PROBES = 8
_NUM_REASONS = 3
_UNLABELLED_ON_PURPOSE = 'set source.label_kind = "none" for a dataset without labels'


@dataclass(slots=True)
class Listed:
    """A source's batches, by the rules of a build."""

    uri: str
    list: Callable[[], Iterator[ListingBatch]]


def list_source(
    source: Lists,
    *,
    seed: int,
    max_source_bytes: int,
    observer: Observer,
    may_be_empty: bool = False,
    group: Group = group_here,
) -> Listing:
    """Stream the whole listing into segments; `group` finds what is in it twice.

    Raises UsageError if it has no image, unless it may be empty, or if it has labels that no image got.
    """
    scratch = Scratch()
    folder = scratch.path
    try:
        with as_storage_error(folder):
            listing = _Segments(folder, seed, group)
            for batch in source.list():
                listing.add(_judged(batch, max_source_bytes))
                observer.event("list.progress", {"num_listed": listing.num_listed + batch.num_found_ahead})
                failpoint("list")
            found = listing.finish()
        if not may_be_empty:
            check_has_images(found, source.uri)
            check_labels(found, tuple(listing.label_hints), source.uri)
    except FileNotFoundError as error:
        scratch.remove()
        raise StorageError(
            f"{error.filename or error} vanished while {source.uri} was listed",
            "expected a source that does not change; nothing was published",
            "run the same command again",
        ) from None
    except BaseException:
        scratch.remove()
        raise
    weakref.finalize(found, scratch.remove)
    return found


@dataclass(slots=True)
class _Segments:
    """The listing under construction."""

    folder: Path
    seed: int
    group: Group
    rejections: RejectionLog = field(init=False)
    warnings: list[str] = field(default_factory=list)
    label_hints: dict[str, None] = field(default_factory=dict)
    multi_labels: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    extra_types: dict[str, str] = field(default_factory=dict)
    images_by_label: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    images_by_bucket: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BUCKETS, np.int64))
    facts_by_bucket: np.ndarray = field(default_factory=lambda: np.zeros((NUM_BUCKETS, 8), np.uint64))
    runs: list[ListingSegment] = field(default_factory=list)
    """Segments of images in the order of arrival; each is sorted by cell."""
    probes: list[tuple[int, str]] = field(default_factory=list)
    key_sum: int = 0
    num_listed: int = 0
    source_bytes: int = 0
    has_all_sizes: bool = True
    _tables: list[pa.Table] = field(default_factory=list)
    _facts: list[np.ndarray] = field(default_factory=list)
    _num_waiting: int = 0
    _are_unique: bool = True

    def __post_init__(self) -> None:
        self.rejections = RejectionLog(self.folder)

    def add(self, batch: ListingBatch) -> None:
        self.warnings += batch.warnings
        self.label_hints.update(dict.fromkeys(batch.label_hints))
        for name, kind in batch.extra_types.items():
            before = self.extra_types.setdefault(name, kind)
            if before != kind:
                raise UsageError(
                    f"the extra column {name!r} is {before} in one part of the source and {kind} in another",
                    "expected one type in all parts",
                    f'give its type in each part: extra_columns = ["{name}:{kind}"]',
                )
        self.rejections.add(batch.rejections)
        images = batch.images.combine_chunks()
        self.num_listed += images.num_rows + len(batch.rejections)
        if not images.num_rows:
            return
        keys_N32 = key_digests(images) if batch.keys_N32 is None else batch.keys_N32
        hashes_N = sample_ids(keys_N32)
        cells_N = _cells(images, hashes_N, self.seed)
        self._are_unique &= batch.ids_N is not None
        ids_N = hashes_N if batch.ids_N is None else batch.ids_N
        rows = pa.table([*images.columns, pa.array(ids_N), pa.array(cells_N)], schema=SEGMENT_SCHEMA)
        self.key_sum += sum_limbs(limbs(keys_N32))
        self.source_bytes += pc.sum(pc.max_element_wise(images.column("size_bytes"), 0)).as_py()
        self.has_all_sizes &= pc.min(images.column("size_bytes")).as_py() != UNKNOWN_SIZE
        for row in images.group_by(["split", "label"]).aggregate([([], "count_all")]).to_pylist():
            self.images_by_label[row["split"], row["label"]] += row["count_all"]
        if batch.extra_types.get(LABEL) == "list<string>":
            for split, text in zip(*(images.column(name).to_pylist() for name in ("split", "extra")), strict=True):
                self.multi_labels.update((split, label) for label in names_of(text))
        self._choose_probes(images, cells_N)
        self._tables.append(rows)
        self._facts.append(fact_limbs(keys_N32, rows))
        self._num_waiting += rows.num_rows
        if self._num_waiting >= SEGMENT_ROWS:
            self._flush()

    def finish(self) -> Listing:
        if self._num_waiting:
            self._flush()
        if not self._are_unique:
            for correction in make_unique(self.folder, [run.path for run in self.runs], self.group):
                self._correct(correction)
        key_sum = add_digests(self.key_sum, self.rejections.key_sum)
        return Listing(
            folder=self.folder,
            segments=by_cells(self.folder, self.runs, self.group),
            rejections=self.rejections,
            images_by_label=self.images_by_label,
            images_by_bucket=self.images_by_bucket,
            facts_by_bucket=self.facts_by_bucket,
            probes=tuple(path for _, path in sorted(self.probes)),
            key_sum=format_digest(key_sum),
            warnings=tuple(self.warnings),
            source_bytes=self.source_bytes,
            has_all_sizes=self.has_all_sizes,
            multi_labels=self.multi_labels,
            extra_types=self.extra_types,
        )

    def _correct(self, correction: Correction) -> None:
        """Count an image that turned out to be listed twice, or to have an id that another one has, as what it is."""
        image = correction.image
        bucket = image["cell"] >> int(_BUCKET_SHIFT)
        self.facts_by_bucket[bucket] += correction.limbs_after - correction.limbs_before
        if correction.rejection is not None:
            self.images_by_label[image["split"], image["label"]] -= 1
            self.images_by_bucket[bucket] -= 1
            self.key_sum -= key_hash(image["key"])
            if self.multi_labels:
                self.multi_labels.subtract((image["split"], label) for label in names_of(image["extra"]))
            self.rejections.add([correction.rejection])

    def _choose_probes(self, images: pa.Table, cells_N: np.ndarray) -> None:
        """Keep the files of the smallest cells: the same ones for any order of the listing."""
        for place in np.argsort(cells_N, kind="stable")[:_NUM_PROBES].tolist():
            path = images.column("container")[place].as_py() or images.column("key")[place].as_py()
            if all(path != known for _, known in self.probes):
                self.probes.append((int(cells_N[place]), path))
        self.probes = heapq.nsmallest(_NUM_PROBES, self.probes)

    def _flush(self) -> None:
        table, facts = pa.concat_tables(self._tables).combine_chunks(), np.concatenate(self._facts)
        self._tables, self._facts, self._num_waiting = [], [], 0
        cells_N = table.column("cell").to_numpy()
        order_N = np.argsort(cells_N, kind="stable")
        buckets_N = (cells_N[order_N] >> _BUCKET_SHIFT).astype(np.int64)
        starts = np.flatnonzero(np.diff(buckets_N, prepend=-1))
        self.facts_by_bucket[buckets_N[starts]] += np.add.reduceat(facts[order_N], starts, axis=0)
        self.images_by_bucket += np.bincount(buckets_N, minlength=NUM_BUCKETS)
        self.runs.append(
            write_segment(self.folder, f"segment-{len(self.runs):05d}.parquet", table.take(pa.array(order_N)))
        )


def _cells(images: pa.Table, ids_N: np.ndarray, seed: int) -> np.ndarray:
    """The cell of each image, uint64: hash order mixes classes and folders, so that chunk reads are mixed already."""
    containers = images.column("container")
    is_in_block = pc.and_(pc.not_equal(containers, ""), pc.not_equal(images.column("block"), NO_BLOCK))
    if not pc.any(is_in_block).as_py():
        return mix64_array(ids_N, seed)
    # The images of one block stay together; blocks are mixed.
    blocks = pc.binary_join_element_wise(containers, images.column("block").cast(pa.string()), "\0")
    encoded = pc.dictionary_encode(blocks.combine_chunks())
    block_ids = np.array([sample_id_of(name) for name in encoded.dictionary.to_pylist()], np.int64)
    of_block_N = block_ids[encoded.indices.to_numpy()]
    return mix64_array(np.where(is_in_block.to_numpy(zero_copy_only=False), of_block_N, ids_N), seed)


def _judged(batch: ListingBatch, max_source_bytes: int) -> ListingBatch:
    """Refuse by size and by label, before any byte is read."""
    images, labels = batch.images, pc.unique(batch.images.column("label")).to_pylist()
    bad_labels = [label for label in labels if label is not None and not is_class_name(label)]
    is_too_large = pc.greater(images.column("size_bytes"), max_source_bytes)
    if not bad_labels and not pc.any(is_too_large).as_py():
        return batch
    is_refused = pc.or_(pc.is_in(images.column("label"), pa.array(bad_labels, pa.string())), is_too_large)
    refused: list[Rejection] = []
    for row in images.filter(is_refused).to_pylist():
        reason = RejectReason.TOO_LARGE_BYTES
        detail = f"{row['size_bytes']} bytes; etl.max_source_bytes is {max_source_bytes}"
        if row["label"] in bad_labels:
            is_long = len(row["label"].encode()) > MAX_CLASS_NAME_BYTES
            reason, detail = RejectReason.BAD_LABEL, "too long" if is_long else f"{row['label']!r} is no class name"
        facts = (row["size_bytes"], row["mtime_ns"], row["etag"])
        refused.append(Rejection(row["key"], reason, detail, *facts, stage="list"))
    is_kept = pc.invert(is_refused)
    return replace(
        batch,
        images=images.filter(is_kept),
        rejections=(*batch.rejections, *refused),
        groups=None,
        keys_N32=None,
        ids_N=None if batch.ids_N is None else batch.ids_N[is_kept.to_numpy()],
    )


def check_has_images(listing: Listing, uri: str) -> None:
    """Raise UsageError if no image is left, with the reasons for which the inputs were refused."""
    if listing.num_images:
        return
    refused = listing.rejections
    if set(refused.by_reason) <= {RejectReason.NOT_AN_IMAGE_NAME}:
        raise UsageError(
            f"no images below {uri} ({len(refused)} other files)",
            "expected image files, preferably in one folder per class",
            "check source.uri",
        )
    # The most frequent reasons, each with its first input.
    first: dict[RejectReason, Rejection] = {}
    for rejection in refused:
        first.setdefault(rejection.reason, rejection)
        if len(first) == len(refused.by_reason):
            break
    reasons = "; ".join(
        f"{times} {reason}, such as {printable(first[reason].key)}: {first[reason].detail}"
        for reason, times in refused.by_reason.most_common(_NUM_REASONS)
    )
    raise UsageError(
        f"no images below {uri}: all {len(refused)} inputs were rejected ({reasons})",
        "expected at least one input that can be used",
        "fix the causes (docs/rejects.md explains the reasons), or correct the keys of the section source",
    )


def check_labels(listing: Listing, label_hints: Sequence[str], uri: str) -> None:
    """Raise UsageError if no image has a label although the source has labels, or if only some images have one.

    `label_hints`: where the source seems to hold labels that it does not take, a phrase each.
    """
    by_label = listing.images_by_label
    num_unlabelled = sum(times for (_, label), times in by_label.items() if label is None)
    if num_unlabelled and num_unlabelled == listing.num_images and label_hints:
        others = f" (and {len(label_hints) - 1} more)" if len(label_hints) > 1 else ""
        raise UsageError(
            f"the dataset would have no labels, and {uri} seems to have some: {label_hints[0]}{others}",
            "expected labels under source.label_field or a usual name (docs/sources.md)",
            "name them with source.label_field (those of boxes: source.boxes.field and source.boxes.labels_field), or "
            f"{_UNLABELLED_ON_PURPOSE}",
        )
    if 0 < num_unlabelled < listing.num_images:
        hints = f": {label_hints[0]}" if label_hints else ""
        splits = sorted({str(split) for (split, label), times in by_label.items() if label is None and split and times})
        of_splits = f", those of {', '.join(splits)}" if splits else ""
        raise UsageError(
            f"{num_unlabelled} of {listing.num_images} images of {uri} have no label{of_splits}{hints}",
            "expected a label for each image, or for none",
            f"exclude the files without labels with a pattern in source.uri, or {_UNLABELLED_ON_PURPOSE}",
        )


# A group-by divides its rows by the first column: into ranges, so that each of its parts is a segment.
_BY_CELL = pa.schema([SEGMENT_SCHEMA.field("cell"), *(field for field in SEGMENT_SCHEMA if field.name != "cell")])


def by_cells(folder: Path, runs: Sequence[ListingSegment], group: Group) -> tuple[ListingSegment, ...]:
    """Segments in `folder` of which each holds a range of cells, in the order of the ranges.

    `runs` are sorted, each by itself. Those of a listing that came in the order of its cells stay as they are: so does
    one alone, and what has changed since an earlier version. Others are brought together by the engine's group-by.
    """
    if all(run.last_cell <= following.first_cell for run, following in itertools.pairwise(runs)):
        return tuple(runs)
    files = tuple(Segment(checksum_file(run.path, (folder / run.path).read_bytes()), run.num_rows) for run in runs)
    asked = GroupBy(
        str(folder), files, _BY_CELL, _as_they_are, _BY_CELL, _in_order, _BY_CELL, rows_per_part=SEGMENT_ROWS
    )
    segments = [
        write_segment(folder, f"cells-{number:05d}.parquet", rows.select(SEGMENT_SCHEMA.names))
        for number, rows in enumerate(group(asked))
        if rows.num_rows
    ]
    for run in runs:
        (folder / run.path).unlink()
    return tuple(segments)


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.take(pa.array(np.argsort(rows.column("cell").to_numpy(), kind="stable")))


def _as_they_are(rows: pa.Table, place: int) -> pa.Table:
    return rows


_IDS = pa.schema([SEGMENT_SCHEMA.field("sample_id")])
# What tells the rows of one id apart, in the order in which they are asked; and where each row is.
_ORDER = ("key", "place", "size_bytes", "mtime_ns")
_PLACED = pa.schema(
    [*_IDS, *(SEGMENT_SCHEMA.field(name) for name in _ORDER), ("segment", pa.int64()), ("row", pa.int64())]
)
# `time` counts how often the row's key was listed before and with it; `new_id` is the id of a key that stays.
_CHANGED = pa.schema([("segment", pa.int64()), ("row", pa.int64()), ("time", pa.int64()), ("new_id", pa.int64())])
_STAYS = 1


@dataclass(frozen=True, slots=True)
class Correction:
    """An image that was counted, and is refused now or has another sample id."""

    image: dict[str, Any]
    """The image's row of the segment."""
    limbs_before: np.ndarray
    """Its `fact_limbs` as counted before."""
    limbs_after: np.ndarray
    """Its `fact_limbs` now; zeros for a rejected image."""
    rejection: Rejection | None


def make_unique(folder: Path, segments: Sequence[str], group: Group) -> Iterator[Correction]:
    """Rewrite those of the segments in `folder` in which a sample id occurs that another image has.

    Of the keys with one id the smallest keeps it, and the others take their next 8 bytes, until all ids differ: so they
    follow from the set of keys alone. A key that is listed twice is refused the second time, under a key of its own,
    because a ledger names no input twice.
    """
    while True:
        ids = (pq.read_table(folder / segment, columns=_IDS.names, use_threads=False) for segment in segments)
        with _grouped(folder, ids) as (files, _):
            asked = GroupBy(str(folder), files, _IDS, _as_they_are, _IDS, _repeated, _IDS)
            found = [each.column("sample_id").to_numpy() for each in group(asked)]
        repeated_N = np.sort(np.concatenate([np.empty(0, np.int64), *found]))
        if not len(repeated_N):
            return
        has_moved = False
        placed = (_placed_rows(folder / segment, number, repeated_N) for number, segment in enumerate(segments))
        with _grouped(folder, placed) as (files, scratch):
            asked = GroupBy(str(folder), files, _PLACED, _as_they_are, _PLACED, _changed, _CHANGED)
            changed = SpilledRows(scratch, _CHANGED)
            for each in group(asked):
                changed.add(each, each.column("segment").to_numpy())
            # One segment after the other.
            for number, segment in enumerate(segments):
                rows = changed.read(number)
                for correction in _rewrite(folder / segment, rows.sort_by("row")) if rows.num_rows else ():
                    has_moved |= correction.rejection is None
                    yield correction
        if not has_moved:
            return


@contextmanager
def _grouped(folder: Path, tables: Iterable[pa.Table]) -> Iterator[tuple[tuple[Segment, ...], Path]]:
    """Tables that a group-by reads, in a folder of their own inside `folder`, which goes at the end; and its path."""
    segments: list[Segment] = []
    with scratch_folder(str(folder)) as scratch:
        for table in (each for each in tables if each.num_rows):
            file = scratch / f"rows-{len(segments):05d}.parquet"
            # Plain: thousands of rows with one id would shrink to less than a byte for each, which readers refuse.
            out = io.BytesIO()
            pq.write_table(table, out, compression="none", use_dictionary=False)
            data = out.getvalue()
            with as_storage_error(file, len(data)):
                file.write_bytes(data)
            segments.append(Segment(checksum_file(str(file.relative_to(folder)), data), table.num_rows))
        yield tuple(segments), scratch


def _placed_rows(file: Path, number: int, repeated_N: np.ndarray) -> pa.Table:
    """The rows of a segment that have one of these ids, and where they are."""
    table = pq.read_table(file, columns=[*_IDS.names, *_ORDER], use_threads=False)
    _, is_repeated_N = find_sorted(repeated_N, table.column("sample_id").to_numpy())
    places_N = np.flatnonzero(is_repeated_N)
    found = table.take(pa.array(places_N))
    return pa.table([*found.columns, np.full(len(places_N), number), places_N], schema=_PLACED)


def _repeated(rows: pa.Table) -> pa.Table:
    return pa.table([np.unique(with_equals(rows).column("sample_id").to_numpy())], schema=_IDS)


def _changed(rows: pa.Table) -> pa.Table:
    """Of all rows with the same ids, those that do not stay as they are."""
    # The first one stays, in an order that does not depend on how the source was listed.
    rows = rows.sort_by([(name, "ascending") for name in ("sample_id", *_ORDER, "segment", "row")])
    ids_N = rows.column("sample_id").to_numpy()
    keys = rows.column("key").combine_chunks().dictionary_encode().indices.to_numpy()
    is_first_of_id_N = np.diff(ids_N, prepend=ids_N[:1] - 1) != 0
    is_first_of_key_N = is_first_of_id_N | (np.diff(keys, prepend=-1) != 0)
    places_N = np.arange(len(ids_N))
    times_N = places_N - np.maximum.accumulate(np.where(is_first_of_key_N, places_N, 0)) + 1
    new_ids_N = ids_N.copy()
    # These are as rare as colliding hashes of 64 bits.
    for place in np.flatnonzero(is_first_of_key_N & ~is_first_of_id_N).tolist():
        new_ids_N[place] = next_sample_id(rows.column("key")[place].as_py(), int(ids_N[place]))
    is_changed = pa.array((times_N > _STAYS) | (new_ids_N != ids_N))
    columns = [rows.column("segment"), rows.column("row"), times_N, new_ids_N]
    return pa.table(columns, schema=_CHANGED).filter(is_changed)


def _rewrite(file: Path, changed: pa.Table) -> Iterator[Correction]:
    """Write a segment anew, and tell what became of the rows of `changed`, which are in row order."""
    table = pq.read_table(file, schema=SEGMENT_SCHEMA)
    rows_N, times_N = (changed.column(name).to_numpy() for name in ("row", "time"))
    place = SEGMENT_SCHEMA.get_field_index("sample_id")
    new_ids_N = table.column(place).to_numpy().copy()
    new_ids_N[rows_N] = changed.column("new_id").to_numpy()
    renewed = table.set_column(place, SEGMENT_SCHEMA.field(place), pa.array(new_ids_N))
    is_kept_N = np.ones(table.num_rows, bool)
    is_kept_N[rows_N] = times_N == _STAYS
    write_rows(file, renewed.filter(pa.array(is_kept_N)))  # still sorted, and in the same range
    before, after = (each.take(pa.array(rows_N)) for each in (table, renewed))
    before_N8, after_N8 = (fact_limbs(key_digests(each), each) for each in (before, after))
    for number, (image, time) in enumerate(zip(before.to_pylist(), times_N.tolist(), strict=True)):
        is_refused = time > _STAYS
        yield Correction(
            image,
            before_N8[number],
            np.zeros_like(after_N8[number]) if is_refused else after_N8[number],
            _rejection(image, time) if is_refused else None,
        )


def _rejection(image: dict[str, Any], time: int) -> Rejection:
    """Raises UsageError if it would lose boxes, as of a table with a row for each of them."""
    if f'"{BOXES}":' in image["extra"]:
        raise UsageError(
            f"{printable(image['key'])} is listed {time} times or more, with boxes each time",
            "expected one row, or one annotation file, with all boxes of an image",
            "join its boxes, or select the files with a pattern in source.uri",
        )
    return Rejection(
        f"{image['key']}\0{time}", RejectReason.DUPLICATE_KEY, "listed before under the same key",
        image["size_bytes"], image["mtime_ns"], image["etag"], stage="list",
    )  # fmt: skip
