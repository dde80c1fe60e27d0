"""Decides which versions `gc` expires and which files it keeps: by number, by age, and by leases of readers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from shardmill.checksummed import ChecksummedFile
from shardmill.dataset.manifest import Manifest, VersionRange
from shardmill.storage import StoredFile

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
