"""Garbage collection: expires versions by a commit, then deletes the files that no version refers to.

Which versions expire follows from their number, their age, and leases of readers. A file is deleted only if no retained
manifest, no leased version and no pending record names it, and it is older than the retention's age. Which files those
are follows from listings alone, so a `gc` that was killed is simply run again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from shardmill.checksummed import ChecksummedFile
from shardmill.dataset.build import PENDING, read_pending
from shardmill.dataset.commit import publish
from shardmill.dataset.dataset import read_shards
from shardmill.dataset.index import INDEXES, ROWS, SHARDS
from shardmill.dataset.leases import (
    LEASES,
    LeaseKind,
    collecting,
    lapsed_writers,
    leased_versions,
    list_leases,
)
from shardmill.dataset.ledger import REJECTS
from shardmill.dataset.manifest import MANIFESTS, Manifest, VersionRange, child_of, manifest_path
from shardmill.dataset.versions import COMMITTED, latest_version, read_manifest
from shardmill.errors import IntegrityError
from shardmill.failpoints import failpoint
from shardmill.storage import Store, StoredFile
from shardmill.values import ShardInfo

# Manifests and the records of their commits are in none of these: they are never deleted. What a killed job leaves in
# the last two (listings for Spark's tasks, nonces) is named by none at all.
_COLLECTED_FOLDERS = (SHARDS, ROWS, INDEXES, REJECTS, PENDING, "listings", "reach")
_ALL_FOLDERS = (*_COLLECTED_FOLDERS, MANIFESTS, COMMITTED, LEASES)
_NUM_DELETERS = 8


UNPUBLISHED = "unpublished"


@dataclass(frozen=True, slots=True)
class Garbage:
    """One file that nothing names."""

    kind: str
    """The folder that it is in, or `unpublished` for one that a killed writer left."""
    file: StoredFile


@dataclass(frozen=True, slots=True)
class Retention:
    """The versions and files that `gc` must keep."""

    keep: int | None = None
    """The newest so many versions never expire; None: none expires. Versions with the very same files count as one."""
    older_than_seconds: float = 7 * 86_400.0
    """Minimum age: no younger version expires, and no younger file is deleted."""


@dataclass(frozen=True, slots=True)
class CommittedVersion:
    """A version that has not expired."""

    manifest: Manifest
    committed: float
    """Time of the commit by the store's clock, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class GcReport:
    """The files that `gc` deleted, or would delete."""

    expired: tuple[int, ...]
    """Versions that expire in this run; those before it have expired already."""
    retained: tuple[int, ...]
    garbage: tuple[Garbage, ...]

    @property
    def size_bytes(self) -> int:
        return sum(each.file.size_bytes for each in self.garbage)


def plan_gc(store: Store, retention: Retention, now: float) -> GcReport:
    """Return the files that `collect_garbage` would delete at the time `now`; changes nothing.

    Raises UsageError or IntegrityError if there is no committed dataset, IntegrityError if the index of a retained
    version is damaged: then nothing tells what it names.
    """
    versions, leases = _unexpired(store), list_leases(store, now)
    expired = choose_expired(versions, retention, now, leased_versions(leases))
    manifests = [each.manifest for each in versions if each.manifest.version not in expired]
    garbage = _find_garbage(store, manifests, retention.older_than_seconds, now, lapsed_writers(leases))
    return GcReport(expired, tuple(each.version for each in manifests), tuple(garbage))


def collect_garbage(store: Store, retention: Retention, run_id: str) -> GcReport:
    """Expire what `retention` does not keep, then delete every old file that nothing names; returns what was done.

    Raises CommitConflict (exit 6) while a writer works, or if one that was suspended commits first; nothing is changed
    then. Raises as `plan_gc` does.
    """
    # Before anything is written, a lease included: this may be no dataset.
    _unexpired(store)
    with collecting(store, f"gc, run {run_id},") as collector:
        # Expire, by a commit: from here on a version without protection cannot be opened, though all of it is there.
        # If a writer's lease has lapsed, there is a commit even if nothing expires: the writer may only be suspended,
        # and the commit takes the version number that it would use (see `publish`).
        lease, versions, now = collector.lease, _unexpired(store), collector.look()
        expired = choose_expired(versions, retention, now, collector.leased_versions)
        if expired or collector.fenced:
            latest = read_manifest(store, latest_version(store))
            all_expired = as_ranges({*numbers_of(latest.expired_versions), *expired})
            draft = child_of(latest, "expire", run_id, content=latest, expired_versions=all_expired)
            publish(store, draft, lease.check)

        # Delete, by what is committed now: of a version whose reader has just ended nothing goes before it expires.
        manifests = [each.manifest for each in _unexpired(store)]
        now, age_seconds = lease.renew(), retention.older_than_seconds
        garbage = tuple(_find_garbage(store, manifests, age_seconds, now, collector.fenced))

        def delete(each: Garbage) -> None:
            # Once the lease has lapsed a writer may have started, and may publish an index under this very name.
            lease.check()
            failpoint("gc_delete")
            (store.delete_unpublished(each.file) if each.kind == UNPUBLISHED else store.delete(each.file.path))

        with ThreadPoolExecutor(_NUM_DELETERS, "shardmill-gc") as pool:
            list(pool.map(delete, garbage))
    return GcReport(expired, tuple(each.version for each in manifests), garbage)


def _unexpired(store: Store) -> list[CommittedVersion]:
    # Without a version this raises: a folder that happens to hold a folder `shards` is no dataset.
    latest = read_manifest(store, latest_version(store) or 1)
    gone = numbers_of(latest.expired_versions)
    found = []
    for file in store.list(MANIFESTS):
        name = re.fullmatch(rf"{MANIFESTS}/([0-9]{{8}})\.json", file.path)
        if name and int(name[1]) not in gone:
            found.append(CommittedVersion(read_manifest(store, int(name[1])), file.mtime_ns / 1e9))
    return sorted(found, key=lambda each: each.manifest.version)


def _find_garbage(
    store: Store, retained: list[Manifest], older_than_seconds: float, now: float, fenced: frozenset[str]
) -> Iterator[Garbage]:
    """`fenced`: leases of writers that can commit nothing any more."""

    def is_old(file: StoredFile) -> bool:
        return now - file.mtime_ns / 1e9 > older_than_seconds

    named = _named_by_leased(store, now)
    named.update(*(_names(manifest, shards) for manifest, shards in _with_shards(store, retained)))
    for file in store.list(PENDING):
        if not is_old(file):
            named |= {file.path, *_names_of_record(store, file.path)}
    for folder in _COLLECTED_FOLDERS:
        yield from (Garbage(folder, file) for file in store.list(folder) if file.path not in named and is_old(file))
    for folder in _ALL_FOLDERS:
        yield from (Garbage(UNPUBLISHED, file) for file in store.list_unpublished(folder) if is_old(file))
    lapsed = {each.path for each in list_leases(store, now) if not each.is_live and each.kind is not LeaseKind.WRITER}
    for file in store.list(LEASES):
        # A fenced writer's lease goes at any age, so that the next `gc` does not commit because of it; no other
        # writer's lease goes, because it is what makes `gc` commit first.
        if file.path in fenced or (file.path in lapsed and is_old(file)):
            yield Garbage(LEASES, file)


def _with_shards(store: Store, manifests: list[Manifest]) -> Iterator[tuple[Manifest, tuple[ShardInfo, ...]]]:
    """Each manifest with its shards; those that name one index, as an expiry and its parent do, read it once."""
    shards_of_index: dict[object, tuple[ShardInfo, ...]] = {}
    for manifest in manifests:
        if manifest.index_segments not in shards_of_index:
            shards_of_index[manifest.index_segments] = read_shards(store, manifest)
        yield manifest, shards_of_index[manifest.index_segments]


def _named_by_leased(store: Store, now: float) -> set[str]:
    """Return the files that a reader needs of a version that has expired since it took its lease."""
    present = {file.path for file in store.list(MANIFESTS)}
    named: set[str] = set()
    for version in leased_versions(list_leases(store, now)):
        if manifest_path(version) not in present:
            continue
        manifest = read_manifest(store, version)
        try:
            named |= _names(manifest, read_shards(store, manifest))
        except IntegrityError:
            # It had expired, and been deleted, before this reader came; opening it says so.
            continue
    return named


def _names(manifest: Manifest, shards: tuple[ShardInfo, ...]) -> set[str]:
    segments = (*manifest.index_segments, *manifest.ledger_segments)
    return {*(segment.path for segment in segments), *(path for each in shards for path in (each.path, each.rows_path))}


def _names_of_record(store: Store, path: str) -> set[str]:
    """The files of a finished unit that waits for its commit; none if its record is damaged, and so useless."""
    try:
        record = read_pending(store, path)
    except (FileNotFoundError, IntegrityError):
        return set()
    return {path for shard in record.shards for path in (shard.path, shard.rows_path)}


def choose_expired(
    versions: Iterable[CommittedVersion], retention: Retention, now: float, leased: Collection[int]
) -> tuple[int, ...]:
    """Numbers of the versions that expire now, in order. The latest never does, nor one that a reader has leased."""
    if retention.keep is None:
        return ()
    newest_first = sorted(versions, key=lambda each: each.manifest.version, reverse=True)
    kept: list[tuple[ChecksummedFile, ...]] = []
    expired: list[int] = []
    for each in newest_first:
        # An expiry names the very index of its parent. Counted apart, each `gc` would push another version out.
        files = each.manifest.index_segments
        if files not in kept and len(kept) < max(1, retention.keep):
            kept.append(files)
        is_old = now - each.committed > retention.older_than_seconds
        if files not in kept and is_old and each.manifest.version not in leased:
            expired.append(each.manifest.version)
    return tuple(sorted(expired))


def as_ranges(versions: Iterable[int]) -> tuple[VersionRange, ...]:
    """Numbers as few ranges: a manifest stays small, however many versions have expired."""
    in_order = sorted(set(versions))
    # Of consecutive numbers, number minus position is constant.
    runs = itertools.groupby(enumerate(in_order), key=lambda pair: pair[1] - pair[0])
    numbers = ([number for _, number in run] for _, run in runs)
    return tuple(VersionRange(first=run[0], last=run[-1]) for run in numbers)


def numbers_of(ranges: Sequence[VersionRange]) -> frozenset[int]:
    """The numbers that `as_ranges` took."""
    return frozenset(number for each in ranges for number in range(each.first, each.last + 1))
