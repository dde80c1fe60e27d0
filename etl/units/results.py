"""Results of work units: a record of each in the dataset, kept for the next run after a crash and removed after the
commit, and those of one build in the driver, on disk except for a few bytes of each unit.

A record refers to shards that nobody has read since: it is used only if it is whole and so is every byte of them.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic, Protocol, TypeVar, overload

from pydantic import TypeAdapter

from etl.listing.listing import Listing
from shardmill.checksummed import verify_file
from shardmill.dataset.build import PENDING, SplitSums, UnitResult, read_pending, write_pending
from shardmill.dataset.index import read_shards, shard_file
from shardmill.dataset.ledger import RejectionLog
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import rows_file
from shardmill.dataset.versions import read_manifest
from shardmill.errors import IntegrityError
from shardmill.storage import Store, StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, UNKNOWN_SIZE, Rejection, ShardInfo


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

    def read_if_there(unit: Unit) -> UnitResult | None:
        # Another run of the same units may have committed and cleared them since they were listed.
        with suppress(FileNotFoundError):
            return read_pending(store, pending_path(unit))

    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-finished") as pool:
        results = pool.map(read_if_there, recorded)
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


def clear_pending(store: Store, units: Sequence[Unit], version: Manifest) -> None:
    """Delete records that are no longer needed, because `version` has these units.

    These units' own, those that a kill left behind an earlier commit, and what was abandoned. Records of a build
    with other units that was interrupted, or runs at this moment, stay: it need not repeat them.
    """
    own, oldest = {pending_path(unit) for unit in units}, time.time() - _ABANDONED_SECONDS
    files = list(store.list(PENDING))
    others = {file.path for file in files if file.path not in own and file.mtime_ns / 1e9 >= oldest}
    committed: set[str] = set()
    # A damaged parent names none: `verify` says so; a failed clean-up must not fail the build.
    with suppress(IntegrityError):
        if others:
            # Of the version and of its parent, which was the latest one when our run began.
            older = read_shards(store, read_manifest(store, version.parent_version)) if version.parent_version else ()
            committed = {shard.path for shard in (*read_shards(store, version), *older)}

    def clear(file: StoredFile) -> None:
        if file.path in others:
            try:
                shards = read_pending(store, file.path).shards
            except (FileNotFoundError, IntegrityError):
                pass  # nobody can ever use a damaged record
            else:
                # A record without shards may be of a run that is at work: nothing in a version tells.
                if not shards or any(shard.path not in committed for shard in shards):
                    return
        store.delete(file.path)

    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-clear") as pool:
        for _ in pool.map(clear, files):
            pass


def _placed(result: UnitResult, unit: Unit) -> UnitResult:
    """The result at the unit's place in its own plan.

    Units of two builds that are equal have one fingerprint, and so one record; their places in the plans may differ.
    Raises IntegrityError for the record of another unit.
    """
    if result.fingerprint != unit.fingerprint:
        raise IntegrityError(f"the record of work unit {unit.index} belongs to another unit")
    return replace(result, unit_index=unit.index)


Item = TypeVar("Item")


class Finished:
    """The results of units, as they come; with all that was refused, by the listing too."""

    def __init__(self, listing: Listing, results: Iterable[UnitResult] = ()) -> None:
        self.results: list[UnitResult] = []
        """Without their rejections. Their shards and sums are read from a local file whenever they are asked for."""
        self.rejections = RejectionLog(listing.folder, listing.rejections)
        self.num_accepted, self.written_bytes = 0, 0
        self._listing = listing  # its folder goes with it
        self._file = listing.folder / f"results-{uuid.uuid4().hex}"
        for result in results:
            self.add(result)

    @property
    def folder(self) -> Path:
        """A local folder that goes with this value."""
        return self._listing.folder

    def add(self, result: UnitResult) -> None:
        """The result of one more unit. Raises StorageError if the disk is full."""
        self.rejections.add(result.rejections)
        self.num_accepted += sum(split.num_rows for split in result.splits)
        self.written_bytes += sum(shard.size_bytes for shard in result.shards)
        shards, splits = (
            self._on_disk(result.shards, _json_of(ShardInfo)),
            self._on_disk(result.splits, _json_of(SplitSums)),
        )
        self.results.append(replace(result, rejections=(), shards=shards, splits=splits))

    def _on_disk(self, items: Sequence[Item], adapter: TypeAdapter[tuple[Item, ...]]) -> Sequence[Item]:
        if not items:
            return ()
        data = adapter.dump_json(tuple(items))
        with as_storage_error(self._file, len(data)), self._file.open("ab") as stream:
            start = stream.tell()
            stream.write(data)
        return _OnDisk(self._listing, self._file, start, len(data), len(items), adapter)


@dataclass(frozen=True, slots=True)
class _OnDisk(Sequence[Item], Generic[Item]):
    """A part of a file that grows; nothing of it stays in memory."""

    listing: Listing
    """The listing whose folder, which is deleted with it, contains the file."""
    file: Path
    start: int
    num_bytes: int
    num_items: int
    adapter: TypeAdapter[tuple[Item, ...]]

    def __len__(self) -> int:
        return self.num_items

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Item]: ...
    def __getitem__(self, place: int | slice) -> Item | Sequence[Item]:
        return self._read()[place]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._read())

    def _read(self) -> tuple[Item, ...]:
        with as_storage_error(self.file), self.file.open("rb") as stream:
            stream.seek(self.start)
            return self.adapter.validate_json(stream.read(self.num_bytes))


@cache
def _json_of(kind: type[Item]) -> TypeAdapter[tuple[Item, ...]]:
    return TypeAdapter(tuple[kind, ...])  # pyright: ignore[reportInvalidTypeForm]  made as it runs
