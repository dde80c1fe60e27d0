"""Builds an append: a version with all rows of the latest version and the new rows of another listing.

An image is known by its key. One that the dataset holds already is not stored again; a key with other bytes or another
class than before is refused, because an append replaces nothing.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.later_runs.refused_before import RefusedBefore
from etl.listing.listing import Listing, limbs, sum_limbs
from etl.listing.segments import find_sorted, key_digests
from shardmill.dataset.build import UnitResult
from shardmill.dataset.index import in_all_formats
from shardmill.dataset.ledger import RejectionLog, read_rejections
from shardmill.dataset.manifest import Manifest, SourceRef
from shardmill.errors import UsageError
from shardmill.ids import add_digests, format_digest, key_hash, sample_id_of
from shardmill.storage import Store
from shardmill.values import Rejection, RejectReason, ShardInfo
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.units.finished import Finished
    from etl.units.shard_rows import RowCopier
    from shardmill.dataset.build import Build

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
    results, refused_now = finished.results, finished.rejections
    read = partial(copier.rows.read, columns=_READ)
    new_ids = {shard.path: read(shard).column("sample_id").to_numpy() for shard in _first_format(results)}
    refused_ids_N = np.fromiter((sample_id_of(each.key) for each in refused_now), np.int64)
    known = _Known.of(read, changes, np.concatenate([refused_ids_N, *new_ids.values()]))
    known.check_refused(refused_now)
    new = tuple(part for result in results for part in _without_known(read, result, new_ids, known, copier))

    # What was refused before and is listed again counts once, as what it is now.
    refused_before = RefusedBefore(partial(read_rejections, copier.store, parent), lambda each: each.key)
    refused_before.mark(each.key for each in refused_now)
    if len(refused_before):
        for keys in _new_keys(read, results):
            refused_before.mark(keys)
        # An archive that was refused for its damage is listed again with the images that are read of it now.
        if damaged := _damaged(copier.store, parent):
            refused_before.mark(damaged & _containers(listing))
    listed_again = RejectionLog(finished.folder, refused_before.marked())
    common = add_digests(known.key_sum, listed_again.key_sum)
    key_sum = add_digests(int(parent.source.key_sum, 16), int(build.source.key_sum, 16), -common)
    return Appended(
        build=replace(
            build,
            operation="append",
            source=_joined(parent.source, build.source, format_digest(key_sum)),
            other_sources=_others(parent, build.source),
            num_listed=parent.counts.listed + build.num_listed - known.num_rows - len(listed_again),
        ),
        changes=replace(
            changes,
            shards=tuple(replace(each, is_kept_N=np.ones_like(each.is_kept_N)) for each in changes.shards),
        ),
        refused_before=refused_before,
        results=new,
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
            known.key_sum += _key_sum(found)
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

    def check_refused(self, rejections: Iterable[Rejection]) -> None:
        """Raise UsageError if one of these inputs is there as a row."""
        for each in rejections:
            if self.candidates.get(sample_id_of(each.key), ("", b""))[0] == each.key:
                raise _taken(each.key, f"is in the dataset, and is now rejected ({each.reason})")


def _taken(key: str, what: str) -> UsageError:
    return UsageError(
        f"{printable(key)} {what}",
        'expected only new keys: etl.write_mode = "append" replaces no image; nothing was published',
        "move the images to a folder with another name, or overwrite: build one source that contains all of them",
    )


def _without_known(
    read: _Read, result: UnitResult, new_ids: Mapping[str, np.ndarray], known: _Known, copier: RowCopier
) -> Iterator[UnitResult]:
    """`new_ids`: the sample ids of each new shard, by its path in the first format."""
    shards = [group[0] for group in in_all_formats(result.shards)]
    is_kept = {shard.path: ~known.holds_rows(read, shard, new_ids[shard.path]) for shard in shards}
    yield from copier.only_kept(result, is_kept)


def _new_keys(read: _Read, results: Sequence[UnitResult]) -> Iterator[list[str]]:
    """Those of one shard after the other."""
    for shard in _first_format(results):
        yield read(shard).column("source").to_pylist()


def _damaged(store: Store, parent: Manifest) -> set[str]:
    """Archives that `parent` refused."""
    if RejectReason.DAMAGED_CONTAINER not in parent.counts.by_reason:
        return set()
    return {each.key for each in read_rejections(store, parent) if each.reason is RejectReason.DAMAGED_CONTAINER}


def _containers(listing: Listing) -> set[str]:
    """Files of which images are listed."""
    files = (pq.ParquetFile(listing.folder / segment.path) for segment in listing.segments)
    batches = (batch for file in files for batch in file.iter_batches(columns=["container"]))
    return {name for batch in batches for name in batch.column("container").unique().to_pylist()}


def _first_format(results: Sequence[UnitResult]) -> Iterator[ShardInfo]:
    return (group[0] for result in results for group in in_all_formats(result.shards))


def _key_sum(rows: pa.Table) -> int:
    return sum_limbs(limbs(key_digests(rows.select(["source"]).rename_columns(["key"])))) if rows.num_rows else 0


def _joined(before: SourceRef, now: SourceRef, key_sum: str) -> SourceRef:
    """`now` with all keys of the version. No listing has this fingerprint: a later build compares row by row."""
    both = f"{before.listing_fingerprint}+{now.listing_fingerprint}"
    update = {
        "key_sum": key_sum,
        "listing_fingerprint": hashlib.sha256(both.encode()).hexdigest(),
        "names_splits": before.names_splits or now.names_splits,
    }
    return now.model_copy(update=update)


def _others(parent: Manifest, now: SourceRef) -> tuple[SourceRef, ...]:
    earlier = (*parent.other_sources, parent.source)
    return tuple(each for each in earlier if not now.continues(each))
