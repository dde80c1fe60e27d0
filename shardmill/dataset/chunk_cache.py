"""A cache of a remote dataset's chunks on this host's disk: each is fetched once for all processes, and verified by
every one that reads it.

An entry is one file, named by its dataset and by the content of its shard. Who fetches it holds a lock on its temporary
file, which becomes the entry by a rename: no half entry is ever seen, and the kernel releases the lock of a killed
process. Nothing is synced: after a power cut a damaged entry is found by its CRC and fetched again, as any other one.
"""

from __future__ import annotations

import hashlib
import operator
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.cache_room import CacheRoom, is_same_file, try_lock
from shardmill.failpoints import failpoint
from shardmill.recycled_memory import hashed, read_blocks
from shardmill.storage import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from shardmill.formats.rows import ByteRange

Data = bytes | memoryview
Take = Callable[[int], np.ndarray]
"""Gives memory of so many bytes."""

# Longer than any fetch but one that is retried. A stopped process holds its locks: others then fetch for themselves.
WAIT_SECONDS = 30.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05


@dataclass(frozen=True, slots=True)
class _Entry:
    """A run of bytes of a shard: where it is here, and what it must be."""

    path: Path
    temporary: Path
    """Where it is while one process fetches it."""
    num_bytes: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """What a cache gave, and what it did not have."""

    hits: int = 0
    hit_bytes: int = 0
    misses: int = 0
    missed_bytes: int = 0
    damaged: int = 0
    """Of the misses: entries that were there and altered."""

    def __add__(self, more: CacheCounts) -> CacheCounts:
        return CacheCounts(*map(operator.add, astuple(self), astuple(more)))

    def __str__(self) -> str:
        return (
            f"cache: {self.hits} hits ({self.hit_bytes} bytes), {self.misses} misses ({self.missed_bytes} bytes), "
            f"{self.damaged} of them damaged here"
        )


class ChunkCache:
    """What the readers of one dataset ask for bytes. Safe to use from several threads."""

    def __init__(self, room: CacheRoom, uri: str) -> None:
        self._room = room
        self._folder = room.root / hashlib.sha256(uri.encode()).hexdigest()[:16]
        self._counts = CacheCounts()
        self._lock = threading.Lock()
        self._keeps = True

    @property
    def counts(self) -> CacheCounts:
        """Since it was opened."""
        with self._lock:
            return self._counts

    def read(
        self, content: str, place: ByteRange, crc32c: int, fetch: Callable[[], Data], take: Take | None = None
    ) -> Data:
        """A run of bytes of the shard with the digest `content`: as they are here and verified, or those of `fetch`,
        which verifies what it gives. `take`: memory for those that are here.

        Raises what `fetch` raises; a disk that refuses only ends the caching.
        """
        # Hashed, so that no index can name a path.
        name = f"{hashlib.sha256(content.encode()).hexdigest()}-{int(place.start)}"
        temporary = self._folder / f"{TEMPORARY_PREFIX}{name}"
        entry = _Entry(self._folder / name, temporary, place.num_bytes, crc32c)
        data, is_damaged = self._find(entry, take)
        if data is not None:
            return self._hit(data)
        descriptor = self._lock_entry(entry, is_damaged=is_damaged)
        try:
            # Another process may have fetched it while this one waited.
            data, is_damaged = self._find(entry, take)
            if data is not None:
                return self._hit(data)
            if is_damaged and descriptor is not None:
                with suppress(OSError):
                    os.unlink(entry.path)
            data = fetch()
            self._count(CacheCounts(misses=1, missed_bytes=len(data), damaged=int(is_damaged)))
            if descriptor is not None:
                self._keep(descriptor, entry, data)
            return data
        finally:
            if descriptor is not None:
                self._unlock(descriptor, entry)

    def _find(self, entry: _Entry, take: Take | None) -> tuple[Data | None, bool]:
        """The verified bytes of an entry, if it is there; and whether it is there and damaged."""
        try:
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None, False
        try:
            if os.fstat(descriptor).st_size != entry.num_bytes:
                return None, True
            data, crc32c = hashed(read_blocks(descriptor, 0, entry.num_bytes, take or _new_memory))
            if len(data) != entry.num_bytes or crc32c != entry.crc32c:
                return None, True
            # What was not used for longest is evicted first.
            os.utime(descriptor)
        except OSError:
            return None, True
        finally:
            os.close(descriptor)
        return (data if take else bytes(data)), False

    def _lock_entry(self, entry: _Entry, *, is_damaged: bool) -> int | None:
        """A descriptor of the entry's temporary file, which this thread alone has locked.

        None if an entry appears where none was, nothing is kept any more, or who has the lock does not end in time.
        """
        deadline, pause = time.monotonic() + WAIT_SECONDS, _FIRST_PAUSE_SECONDS
        while self._keeps:
            try:
                descriptor = _open_locked(entry.temporary)
            except OSError as error:
                self._stop_keeping(error)
                return None
            if descriptor is not None:
                return descriptor
            if time.monotonic() > deadline or (not is_damaged and entry.path.exists()):
                return None
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        return None

    def _unlock(self, descriptor: int, entry: _Entry) -> None:
        with suppress(OSError):
            if is_same_file(descriptor, entry.temporary):
                os.unlink(entry.temporary)
        os.close(descriptor)

    def _keep(self, descriptor: int, entry: _Entry, data: Data) -> None:
        try:
            # A killed process may have left more than this.
            os.ftruncate(descriptor, 0)
            if data:
                os.posix_fallocate(descriptor, 0, len(data))
            if not self._room.reserve(len(data), entry.temporary):
                return
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            failpoint("cache_keep")
            os.rename(entry.temporary, entry.path)
        except OSError as error:
            self._stop_keeping(error)

    def _stop_keeping(self, error: OSError) -> None:
        with self._lock:
            was_keeping, self._keeps = self._keeps, False
        if was_keeping:
            warnings.warn(
                f"the cache {self._room.root} stores no more chunks: {error.strerror or error}; reading continues "
                "without storing them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _hit(self, data: Data) -> Data:
        self._count(CacheCounts(hits=1, hit_bytes=len(data)))
        return data

    def _count(self, more: CacheCounts) -> None:
        with self._lock:
            self._counts += more


def _open_locked(path: Path) -> int | None:
    """A descriptor of the file at `path`, made if it is not there and locked; None if another one has locked it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    if try_lock(descriptor) and is_same_file(descriptor, path):
        return descriptor
    # What was at `path` may have become the entry, or was swept, before this one had the lock.
    os.close(descriptor)
    return None


def _new_memory(num_bytes: int) -> np.ndarray:
    return np.empty(num_bytes, np.uint8)
