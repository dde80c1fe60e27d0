"""Keeps the results of finished units in the driver: on disk, except for a few bytes of each unit."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar, overload

from pydantic import TypeAdapter

from etl.listing.listing import Listing
from shardmill.dataset.build import SplitSums, UnitResult
from shardmill.dataset.ledger import RejectionLog
from shardmill.storage_errors import as_storage_error
from shardmill.values import ShardInfo

Item = TypeVar("Item")


class Finished:
    """The results of units, as they come; with all that was refused, by the listing too."""

    def __init__(self, listing: Listing, results: Iterable[UnitResult] = ()) -> None:
        self.results: list[UnitResult] = []
        """Without their rejections. Their shards and sums are read from a local file whenever they are asked for."""
        self.rejections = RejectionLog(listing.folder, listing.rejections)
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
        shards, splits = self._on_disk(result.shards, _shards()), self._on_disk(result.splits, _splits())
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
def _shards() -> TypeAdapter[tuple[ShardInfo, ...]]:
    return TypeAdapter(tuple[ShardInfo, ...])


@cache
def _splits() -> TypeAdapter[tuple[SplitSums, ...]]:
    return TypeAdapter(tuple[SplitSums, ...])
