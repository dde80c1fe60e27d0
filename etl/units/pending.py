"""Records of finished work units: kept for the next run after a crash, removed after the commit.

A record refers to shards that nobody has read since: it is used only if it is whole and so is every byte of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from shardmill.checksummed import verify_file
from shardmill.dataset.build import PENDING, UnitResult, read_pending, write_pending
from shardmill.dataset.index import read_shards, shard_file
from shardmill.dataset.row_segments import rows_file
from shardmill.dataset.versions import read_manifest
from shardmill.errors import IntegrityError
from shardmill.storage import Store, StoredFile
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, UNKNOWN_SIZE, Rejection


class Unit(Protocol):
    """The content of a record."""

    @property
    def index(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


# A run that was not resumed for so long only has to repeat its work.
_ABANDONED_SECONDS = 7 * 86_400.0
_NUM_AT_ONCE = 8


def pending_path(unit: Unit) -> str:
    """The path of a finished unit's record."""
    return f"{PENDING}/{unit.fingerprint}.json"


def keep_result(store: Store, unit: Unit, result: UnitResult) -> None:
    """Write a finished unit's record: after a crash, a run that plans the same unit finds it and does not repeat it."""
    write_pending(store, pending_path(unit), result)


def kept_results(store: Store, units: Sequence[Unit]) -> Iterator[UnitResult]:
    """Return the results of these exact units from an earlier run that may be committed; the other units must run.

    Records that cannot be used are removed: while units run, a record says that its unit has finished.
    """

    def kept_or_removed(unit: Unit) -> UnitResult | None:
        result = kept_result(store, unit)
        if result is None:
            store.delete(pending_path(unit))
        return result

    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-kept") as pool:
        yield from (result for result in pool.map(kept_or_removed, _recorded(store, units)) if result is not None)


def finished_units(store: Store, units: Sequence[Unit]) -> Iterator[UnitResult]:
    """The results of those of `units` that have finished by now, as their own tasks recorded them."""
    recorded = _recorded(store, units)
    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-finished") as pool:
        results = pool.map(lambda unit: _read_if_there(store, pending_path(unit)), recorded)
        for unit, result in zip(recorded, results, strict=True):
            if result is not None:
                yield _placed(result, unit)


def _recorded(store: Store, units: Sequence[Unit]) -> list[Unit]:
    present = {file.path for file in store.list(PENDING)}
    return [unit for unit in units if pending_path(unit) in present]


def kept_result(store: Store, unit: Unit) -> UnitResult | None:
    """Return the result of this exact unit from an earlier run, if its rejections and its files are still valid.

    A damaged record or file counts as absent: the unit is run again.
    """
    try:
        result = _placed(read_pending(store, pending_path(unit)), unit)
        if not all(_still_holds(rejection) for rejection in result.rejections):
            return None
        for shard in result.shards:
            verify_file(store, shard_file(shard))
            verify_file(store, rows_file(shard))
    except (FileNotFoundError, IntegrityError):
        return None
    return result


def _still_holds(rejection: Rejection) -> bool:
    """Whether the listing vouches for a refusal: an equal unit has inputs of equal size, time and etag, if any.

    Of one that is known by name alone the listing would not show that it was repaired.
    """
    is_known = rejection.size_bytes != UNKNOWN_SIZE or rejection.mtime_ns != 0 or rejection.etag != ""
    return is_known and rejection.reason not in TRANSIENT_REASONS | ANNOTATION_REASONS


def clear_pending(store: Store, units: Sequence[Unit], version: int) -> None:
    """Delete records that are no longer needed, because `version` has these units.

    These units' own, those that a kill left behind an earlier commit, and what was abandoned. Records of a build
    with other units that was interrupted, or runs at this moment, stay: it need not repeat them.
    """
    own = {pending_path(unit) for unit in units}
    files = list(store.list(PENDING))
    others = {file.path for file in files if file.path not in own and not _is_abandoned(file)}
    committed = _committed_shards(store, version) if others else frozenset()

    def clear(file: StoredFile) -> None:
        if file.path not in others or _is_settled(store, file, committed):
            store.delete(file.path)

    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-clear") as pool:
        for _ in pool.map(clear, files):
            pass


def _committed_shards(store: Store, version: int) -> frozenset[str]:
    """Paths of the shards of a version and of its parent, which was the latest one when our run began.

    Empty if the parent is damaged: `verify` says so; a failed clean-up must not fail the build.
    """
    try:
        manifest = read_manifest(store, version)
        parent = manifest.parent_version
        older = read_shards(store, read_manifest(store, parent)) if parent else ()
        return frozenset(shard.path for shard in (*read_shards(store, manifest), *older))
    except IntegrityError:
        return frozenset()


def _is_settled(store: Store, file: StoredFile, committed: frozenset[str]) -> bool:
    try:
        record = read_pending(store, file.path)
    except (FileNotFoundError, IntegrityError):
        # Nobody can ever use a damaged record.
        return True
    # A record without shards may be of a run that is at work: nothing in a version tells.
    return bool(record.shards) and all(shard.path in committed for shard in record.shards)


def _placed(result: UnitResult, unit: Unit) -> UnitResult:
    """The result at the unit's place in its own plan.

    Units of two builds that are equal have one fingerprint, and so one record; their places in the plans may differ.
    Raises IntegrityError for the record of another unit.
    """
    if result.fingerprint != unit.fingerprint:
        raise IntegrityError(f"the record of work unit {unit.index} belongs to another unit")
    return replace(result, unit_index=unit.index)


def _read_if_there(store: Store, path: str) -> UnitResult | None:
    # Another run of the same units may have committed and cleared them since they were listed.
    with suppress(FileNotFoundError):
        return read_pending(store, path)


def _is_abandoned(file: StoredFile) -> bool:
    return file.mtime_ns / 1e9 < time.time() - _ABANDONED_SECONDS
