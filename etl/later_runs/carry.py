"""Carries shards of an older version into a new one: referenced again, or copied without the rows that changed; an
append carries all of them, and adds the new rows of another listing.

Each becomes the result of a work unit that did not have to run, so that the commit adds up all units alike. In an
append, an image is known by its key. One that the dataset holds already is not stored again; a key with other bytes or
another class than before is refused, because an append replaces nothing.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.config import EQUAL_IN_APPENDS, etl_settings_of
from etl.later_runs.changes import RefusedBefore
from etl.listing.listing import Listing, find_sorted, key_digests, limbs, sum_limbs
from etl.units.units import CopyUnit, ListingLocation, UnitTask
from shardmill.dataset.build import Build, SplitSums, UnitResult
from shardmill.dataset.index import in_all_formats
from shardmill.dataset.ledger import RejectionLog, read_rejections
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.statistics import ImageSizes
from shardmill.errors import UsageError
from shardmill.ids import DIGEST_MODULUS, add_digests, format_digest, key_hash, sample_id_of
from shardmill.values import RejectReason, ShardInfo
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes, ShardRows
    from etl.units.copy_rows import RowCopier
    from etl.units.results import Finished
    from shardmill.dataset.build import Build
    from shardmill.dataset.manifest import Manifest
    from shardmill.dataset.row_segments import RowReader
    from shardmill.dataset.shard import Copies


# With fewer shards than that in a split, a run that adds rows copies none.
_MIN_MERGED = 6
Copy = Callable[[Sequence[CopyUnit], UnitTask], Iterator[UnitResult]]
"""Runs `etl.units.copy_rows.copy_rows` over units, in any order."""


def carry(parent: Manifest, changes: Changes, copier: RowCopier, task: UnitTask, copy: Copy) -> Iterator[UnitResult]:
    """One result for each shard of which a row is left, or for all of them. `copy` makes those that need new files.

    Raises IntegrityError if a shard that must be copied, or a row segment, does not match the older version's record.
    """
    # If all rows of `parent` stay as they are, its manifest has added them up already.
    is_untouched = all(shard.is_whole and shard.restated is None for shard in changes.shards)
    num_rows = sum(len(shard.is_kept_N) for shard in changes.shards)  # without those of lost shards
    has_its_classes = parent.class_names == task.row_schema.class_names
    if is_untouched and num_rows == parent.counts.accepted and has_its_classes:
        yield _result_of_version(parent, changes, copier)
        return
    units: list[CopyUnit] = []
    for index, shard in enumerate(changes.shards, start=-len(changes.shards)):
        if shard.is_whole and shard.restated is None:
            result = copier.result_of(index, shard.copies, shard.is_kept_N)
            if result is not None:
                yield result
        elif shard.is_kept_N.any():
            units.append(_copy_unit(index, shard, task))
    if units:
        # None of these units reads the listing.
        yield from copy(units, replace(task, listing=ListingLocation("", ())))


def _result_of_version(parent: Manifest, changes: Changes, copier: RowCopier) -> UnitResult:
    """Return the result of one unit that would have written all of `parent`, without adding up a row."""
    refused = (key_hash(each.key) for each in read_rejections(copier.store, parent))
    # A manifest has channel sums of the train split alone, and sizes of all splits: here they are the first one's.
    nothing, sums, splits = (0,) * parent.normalize.num_channels, parent.channel_sums, list[SplitSums]()
    for name, split in parent.splits.items():
        is_train = name == "train"
        splits.append(
            SplitSums(
                split=name,
                num_rows=split.num_rows,
                image_bytes=split.image_bytes,
                class_counts=split.class_counts,
                row_digest_sum=split.row_digest_sum,
                num_pixels=sums.num_pixels if is_train else 0,
                channel_sums=sums.sums if is_train else nothing,
                channel_square_sums=sums.square_sums if is_train else nothing,
                sizes=ImageSizes() if splits else parent.sizes,
            )
        )
    return UnitResult(
        unit_index=-len(changes.shards),
        fingerprint="",
        shards=tuple(copy for copies in _with_merged(changes, copier) for copy in copies),
        splits=tuple(splits),
        rejections=(),
        accepted_key_sum=format_digest(add_digests(int(parent.source.key_sum, 16), -sum(refused))),
        note_counts=tuple(parent.counts.by_note.items()),
    )


def _with_merged(changes: Changes, copier: RowCopier) -> Iterator[Copies]:
    """All shards, the small ones at the end of each split merged: their number grows with the logarithm of the runs
    that added them. Rows stay in their order.
    """
    of_splits: dict[str, list[Copies]] = {}
    for shard in changes.shards:
        of_splits.setdefault(shard.copies[0].split, []).append(shard.copies)
    for shards in of_splits.values():
        first = first_to_merge([copies[0].size_bytes for copies in shards], copier.max_merged_bytes)
        yield from shards[:first]
        if first < len(shards):
            yield from copier.merge(shards[first:])


def first_to_merge(sizes: Sequence[int], max_bytes: int) -> int:
    """The place from which on the last shards of a split are merged, given their sizes in bytes; behind all for none.

    A shard is merged once those behind it are as large: so a row is copied each time that what it is part of doubles.
    """
    first, behind = len(sizes), 0
    for place in reversed(range(len(sizes))):
        if behind + sizes[place] > max_bytes:
            break
        if len(sizes) - place >= _MIN_MERGED and sizes[place] <= behind:
            first = place
        behind += sizes[place]
    return first


def _copy_unit(index: int, shard: ShardRows, task: UnitTask) -> CopyUnit:
    kept = base64.b64encode(np.packbits(shard.is_kept_N).tobytes()).decode()
    restated = ""
    if shard.restated is not None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, shard.restated.schema) as writer:
            writer.write_table(shard.restated)
        restated = base64.b64encode(sink.getvalue().to_pybytes()).decode()
    sizes = (task.config.chunk_bytes, task.config.shard_max_bytes)
    deciding = repr((index, shard.copies, kept, restated, task.row_schema, sizes))
    fingerprint = hashlib.sha256(deciding.encode()).hexdigest()
    return CopyUnit(index, fingerprint, shard.copies, kept, restated, int(shard.is_kept_N.sum()))


def changes_nothing(reader: RowReader, changes: Changes, results: Sequence[UnitResult]) -> bool:
    """Whether the new rows of `results` are the very rows that were removed, as those of touched files are."""
    balance: Counter[str] = Counter()
    for shard in changes.shards:
        if not shard.is_whole:
            rows = reader.read(shard.copies[0], ("row_sha256",))
            removed = rows.filter(pa.array(~shard.is_kept_N)).column("row_sha256").to_pylist()
            balance[shard.copies[0].split] -= sum(int.from_bytes(digest, "big") for digest in removed)
    for part in (part for result in results for part in result.splits):
        balance[part.split] += int(part.row_digest_sum, 16)
    return not any(total % DIGEST_MODULUS for total in balance.values())


def check_appendable(parent: Manifest, build: Build, *, is_labelled: bool) -> None:
    """Raise UsageError unless rows of `build` may be added to those of `parent`; `is_labelled`: they have classes."""
    was_labelled = any(times for split in parent.splits.values() for times in split.class_counts)
    # Rows that were accepted under other ones may not stand, or not in their split.
    settings = etl_settings_of(EQUAL_IN_APPENDS)
    facts = (
        ("formats", sorted(parent.formats), sorted(build.formats)),
        ("pixels", parent.normalization_fingerprint, build.normalization_fingerprint),
        ("columns", parent.columns, build.columns),
        *((name.replace("_", " "), parent.config.get(name), build.config.get(name)) for name in settings),
        ("labels", was_labelled, is_labelled),
    )
    other = [name for name, before, now in facts if before != now]
    if other:
        raise UsageError(
            f"the images to append would have other {', '.join(other)} than those of version {parent.version}",
            'expected the same ones, because etl.write_mode = "append" adds rows to the old ones',
            f"use the config of version {parent.version} (`shardmill inspect DATASET@{parent.version} --json`), or "
            "another dataset.uri",
        )


_READ = ("source", "sample_id", "row_sha256")
_Read = Callable[[ShardInfo], pa.Table]


@dataclass(frozen=True, slots=True)
class Appended:
    """The values that the commit of an append needs."""

    build: Build
    """Facts of all rows of the new version."""
    changes: Changes
    """All rows of the older version."""
    refused_before: RefusedBefore
    """Earlier rejections; unmarked ones are not listed again."""
    results: tuple[UnitResult, ...]
    """Results of the new rows."""


def append(
    parent: Manifest, build: Build, changes: Changes, finished: Finished, listing: Listing, copier: RowCopier
) -> Appended:
    """`finished`: what became of all inputs of `listing` that were not found unchanged in `parent`, or refused before.

    Raises UsageError if an input has the key, or the sample id, of a row that differs from it.
    """
    results, refused_now, store = finished.results, finished.rejections, copier.store
    read = partial(copier.rows.read, columns=_READ)
    firsts = [[group[0] for group in in_all_formats(result.shards)] for result in results]
    new_ids = {shard.path: read(shard).column("sample_id").to_numpy() for shard in itertools.chain(*firsts)}
    refused_ids_N = np.fromiter((sample_id_of(each.key) for each in refused_now), np.int64)
    known = _Known.of(read, changes, np.concatenate([refused_ids_N, *new_ids.values()]))
    for each in refused_now:
        if known.candidates.get(sample_id_of(each.key), ("", b""))[0] == each.key:
            raise _taken(each.key, f"is in the dataset, and is now rejected ({each.reason})")
    new: list[UnitResult] = []
    for result, shards in zip(results, firsts, strict=True):
        is_kept = {shard.path: ~known.holds_rows(read, shard, new_ids[shard.path]) for shard in shards}
        new += copier.only_kept(result, is_kept)

    # What was refused before and is listed again counts once, as what it is now.
    refused_before = RefusedBefore(partial(read_rejections, store, parent), lambda each: each.key)
    refused_before.mark(each.key for each in refused_now)
    if len(refused_before):
        for shard in itertools.chain(*firsts):
            refused_before.mark(read(shard).column("source").to_pylist())
        # An archive that was refused for its damage is listed again with the images that are read of it now.
        if RejectReason.DAMAGED_CONTAINER in parent.counts.by_reason:
            reason = RejectReason.DAMAGED_CONTAINER
            damaged = {each.key for each in read_rejections(store, parent) if each.reason is reason}
            refused_before.mark(damaged & _containers(listing))
    listed_again = RejectionLog(finished.folder, refused_before.marked())
    common = add_digests(known.key_sum, listed_again.key_sum)
    key_sum = add_digests(int(parent.source.key_sum, 16), int(build.source.key_sum, 16), -common)

    # The source has all keys of the version. No listing has its fingerprint: a later build compares row by row.
    before, now = parent.source, build.source
    joined = {
        "key_sum": format_digest(key_sum),
        "listing_fingerprint": hashlib.sha256(
            f"{before.listing_fingerprint}+{now.listing_fingerprint}".encode()
        ).hexdigest(),
        "names_splits": before.names_splits or now.names_splits,
    }
    return Appended(
        build=replace(
            build,
            operation="append",
            source=now.model_copy(update=joined),
            other_sources=tuple(each for each in (*parent.other_sources, before) if not now.continues(each)),
            num_listed=parent.counts.listed + build.num_listed - known.num_rows - len(listed_again),
        ),
        changes=replace(
            changes, shards=tuple(replace(each, is_kept_N=np.ones_like(each.is_kept_N)) for each in changes.shards)
        ),
        refused_before=refused_before,
        results=tuple(new),
    )


@dataclass(slots=True)
class _Known:
    """The inputs that the older version holds as rows: found unchanged in the listing, or read and found equal."""

    num_rows: int
    key_sum: int
    candidates: dict[int, tuple[str, bytes]]
    """Sample id of a new input -> key and digest of the row that has it already."""

    @classmethod
    def of(cls, read: _Read, changes: Changes, new_ids_N: np.ndarray) -> _Known:
        known, new_ids_N = cls(0, 0, {}), np.sort(new_ids_N)
        for shard in changes.shards:
            rows = read(shard.copies[0])
            found = rows.filter(pa.array(shard.is_kept_N))
            known.num_rows += found.num_rows
            if found.num_rows:
                keys_N32 = key_digests(found.select(["source"]).rename_columns(["key"]))
                known.key_sum += sum_limbs(limbs(keys_N32))
            _, is_candidate_N = find_sorted(new_ids_N, rows.column("sample_id").to_numpy())
            for row in rows.filter(pa.array(is_candidate_N)).to_pylist():
                known.candidates[row["sample_id"]] = row["source"], row["row_sha256"]
        return known

    def holds_rows(self, read: _Read, shard: ShardInfo, ids_N: np.ndarray) -> np.ndarray:
        """Like `holds`, for each row of a new shard; the shard is read only if the ids show that a row may exist."""
        if self.candidates.keys().isdisjoint(ids_N.tolist()):
            return np.zeros(len(ids_N), bool)
        return np.array([self.holds(row) for row in read(shard).to_pylist()], bool)

    def holds(self, row: dict) -> bool:
        """Whether this new row is there already; counts it. Raises UsageError if another one is in its place."""
        key, digest = self.candidates.get(row["sample_id"], (None, b""))
        if key is None:
            return False
        if key != row["source"]:
            raise _taken(row["source"], f"has the sample id of {printable(key)}, which is in the dataset")
        if digest != row["row_sha256"]:
            raise _taken(key, "is in the dataset with other bytes or another class")
        self.num_rows += 1
        self.key_sum += key_hash(key)
        return True


def _taken(key: str, what: str) -> UsageError:
    return UsageError(
        f"{printable(key)} {what}",
        'expected only new keys: etl.write_mode = "append" replaces no image; nothing was published',
        "move the images to a folder with another name, or overwrite: build one source that contains all of them",
    )


def _containers(listing: Listing) -> set[str]:
    """Files of which images are listed."""
    files = (pq.ParquetFile(listing.folder / segment.path) for segment in listing.segments)
    batches = (batch for file in files for batch in file.iter_batches(columns=["container"]))
    return {name for batch in batches for name in batch.column("container").unique().to_pylist()}
