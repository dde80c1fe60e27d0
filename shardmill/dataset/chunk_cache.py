"""A cache of a remote dataset's chunks on this host's disk: each is fetched once for all processes, and verified by
every one that reads it.

    CACHE_DIR/shardmill-cache-1/CACHEDIR.TAG            marks the folder as a cache; backups skip it
                                room                    an upper bound of the bytes in it; locked while it changes
                                <dataset>/<entry>       named by its dataset and by the content of its shard
                                <dataset>/.tmp-<entry>  being fetched, or left by a killed process

Who fetches an entry holds a lock on its temporary file, which becomes the entry by a rename: no half entry is ever
seen, and the kernel releases the lock of a killed process. Nothing is synced: after a power cut a damaged entry is
found by its CRC and fetched again, as any other one. All processes keep the limit (`CacheQuota`) together. Only files
with such names are ever deleted, and only in a folder with our tag.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import operator
import os
import re
import shutil
import struct
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardmill.errors import StorageError, UsageError
from shardmill.failpoints import failpoint
from shardmill.memory import hashed, read_blocks
from shardmill.storage import TEMPORARY_PREFIX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from shardmill.formats.rows import ByteRange


Data = bytes | memoryview

Take = Callable[[int], np.ndarray]
"""Gives memory of so many bytes."""


FOLDER, TAG = "shardmill-cache-1", "CACHEDIR.TAG"

# https://bford.info/cachedir/
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Chunks of shardmill datasets; safe to delete.\n"

_HELD = struct.Struct("<q")

_DATASET = re.compile("[0-9a-f]{16}")

_ENTRY = re.compile("[0-9a-f]{64}-[0-9]+")

# Longer than any fetch but one that is retried. A stopped process holds its locks: others then fetch for themselves.
WAIT_SECONDS = 30.0

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.05

# Whoever has the lock scans the cache at the most, unless it was stopped.
_WAIT_SECONDS = 30.0

# Of the limit: a scan of all entries makes room for many.
_KEPT_FRACTION = 0.9


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

    def __init__(self, quota: CacheQuota, uri: str) -> None:
        self._quota = quota
        self._folder = quota.root / hashlib.sha256(uri.encode()).hexdigest()[:16]
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
            data, crc32c = hashed(
                read_blocks(descriptor, 0, entry.num_bytes, take or partial(np.empty, dtype=np.uint8))
            )
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
            if not self._quota.reserve(len(data), entry.temporary):
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
                f"the cache {self._quota.root} stores no more chunks: {error.strerror or error}; reading continues "
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


@dataclass(frozen=True, slots=True)
class _File:
    """An entry of the cache, or one to be."""

    path: str
    num_bytes: int
    mtime_ns: int
    is_fetched: bool
    """Whether it is an entry, and may be evicted; a living process writes another one."""


class CacheQuota:
    """A cache's folder and its limit."""

    def __init__(self, root: Path, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes

    def reserve(self, num_bytes: int, temporary: Path) -> bool:
        """Whether so many bytes, which `temporary` takes already, may become an entry; makes room for them.

        False if the limit does not allow it. Raises OSError; TimeoutError if another process keeps the room locked.
        """
        with _locked(self.root) as descriptor:
            if descriptor is None:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps it locked")
            held = _read_held(descriptor)
            if held is None or held + num_bytes > self.limit_bytes:
                # A process that was killed has reserved and not kept: what is there decides.
                held = self._evict(int(_KEPT_FRACTION * self.limit_bytes) - num_bytes, temporary)
            if held + num_bytes > self.limit_bytes:
                return False
            os.pwrite(descriptor, _HELD.pack(held + num_bytes), 0)
            return True

    def held_bytes(self) -> int:
        """Bytes of all files in it. Scans it; sweeps what killed processes left."""
        with _locked(self.root) as descriptor:
            held = self._evict(self.limit_bytes, None)
            if descriptor is not None:
                os.pwrite(descriptor, _HELD.pack(held), 0)
            return held

    def _evict(self, until_bytes: int, skipped: Path | None) -> int:
        """Delete entries, the one that was not used for longest first, until so many bytes are left; return these."""
        files = list(self._files(skipped))
        held = sum(file.num_bytes for file in files)
        if held > until_bytes:
            fetched = (file for file in files if file.is_fetched)
            for file in sorted(fetched, key=lambda file: file.mtime_ns):
                if held <= until_bytes:
                    break
                with suppress(FileNotFoundError):
                    os.unlink(file.path)
                held -= file.num_bytes
        return held

    def _files(self, skipped: Path | None) -> Iterator[_File]:
        """Every entry, and what living processes fetch; what killed ones have left is deleted."""
        for folder in os.scandir(self.root):
            if not _DATASET.fullmatch(folder.name) or not folder.is_dir(follow_symlinks=False):
                continue
            for found in os.scandir(folder):
                is_temporary = found.name.startswith(TEMPORARY_PREFIX)
                if found.path == str(skipped) or not _ENTRY.fullmatch(found.name.removeprefix(TEMPORARY_PREFIX)):
                    continue
                with suppress(FileNotFoundError):
                    status = found.stat(follow_symlinks=False)
                    if not found.is_file(follow_symlinks=False) or (is_temporary and _is_swept(found.path)):
                        continue
                    yield _File(found.path, status.st_size, status.st_mtime_ns, not is_temporary)


def open_quota(cache_dir: str, limit_bytes: int | None, wanted_bytes: int, *, named: str = "cache_dir") -> CacheQuota:
    """The quota of the cache below `cache_dir`, which is made if it is not there.

    `limit_bytes`: by default half of what the disk can give. `wanted_bytes`: what the reader would fill of it. `named`:
    the setting, for messages. Raises StorageError for a disk that cannot be written to or has not enough space, and for
    a folder that is not a cache's.
    """
    folder = Path(os.path.abspath(os.path.expanduser(cache_dir)))
    root = folder / FOLDER
    try:
        root.mkdir(parents=True, exist_ok=True)
        _tag(root, named)
        quota = CacheQuota(root, 1 << 62)
        held, free = quota.held_bytes(), shutil.disk_usage(root).free
    except OSError as error:
        raise StorageError(
            f"{named} = {cache_dir!r}: cannot write to {error.filename or root}: {error.strerror or error}",
            "expected a folder on a local disk that this process may write to",
            f"name another folder, or omit {named} to read without a cache",
        ) from None
    quota.limit_bytes = (held + free) // 2 if limit_bytes is None else limit_bytes
    needed = min(quota.limit_bytes, wanted_bytes) if limit_bytes is not None else 0
    if needed > held + free:
        raise StorageError(
            f"{named} = {cache_dir!r}: the cache would grow to {needed} bytes, and its disk has {free} free",
            f"expected {needed - held} bytes of free space in addition to the {held} bytes in the cache",
            f"free space, set a limit of at most {held + free} bytes, or name a folder on another disk",
        )
    return quota


def _tag(root: Path, named: str) -> None:
    """Make the folder a cache's. Raises StorageError if it holds what no cache has put there."""
    tag, temporary = root / TAG, root / f"{TEMPORARY_PREFIX}tag"
    others = {found.name for found in os.scandir(root)} - {TAG, "room", temporary.name}
    if tag.exists():
        if tag.read_bytes() == _TAG_TEXT:
            return
    elif not others:
        with _locked(root) as descriptor:
            if descriptor is not None and not tag.exists():
                temporary.write_bytes(_TAG_TEXT)
                os.rename(temporary, tag)
        return
    raise StorageError(
        f"{root} is not a cache of shardmill: it holds other files, and no {TAG} of ours",
        "expected an empty folder, or one that shardmill made",
        f"move it away, or set {named} to another folder",
    )


@contextmanager
def _locked(root: Path) -> Iterator[int | None]:
    """A descriptor of the file `room`, locked; None if another process does not release it in time."""
    descriptor = os.open(root / "room", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (is_mine := try_lock(descriptor)) and time.monotonic() < deadline:
            time.sleep(0.002)
        yield descriptor if is_mine else None
    finally:
        os.close(descriptor)


def _read_held(descriptor: int) -> int | None:
    """The bytes that are held, as the last process wrote them; None if no one did."""
    data = os.pread(descriptor, _HELD.size, 0)
    return _HELD.unpack(data)[0] if len(data) == _HELD.size else None


def _is_swept(path: str) -> bool:
    """Delete a temporary file, if no living process has locked it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if not try_lock(descriptor) or not is_same_file(descriptor, Path(path)):
            return False
        # Who has opened and not locked it yet sees that it is gone, and makes a new one.
        with suppress(FileNotFoundError):
            os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Whether this open file is locked now; another one that has the lock keeps it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_same_file(descriptor: int, path: Path) -> bool:
    """Whether `path` still names the file that `descriptor` has open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Where chunks of remote datasets are kept, and how many bytes of them."""

    folder: str
    limit_bytes: int | None = None
    """Of all datasets and processes together; by default half of what the disk has free when a loader is made."""
    named: tuple[str, str] = ("cache_dir", "cache_limit_bytes")
    """The two settings, for messages."""


def open_cache(dataset: Dataset, spec: PlanSpec, format: str, options: CacheOptions) -> ChunkCache | None:
    """The cache for a reader of this plan; None, with a warning, for a dataset in a local folder.

    Raises UsageError for a limit that one window does not fit into, StorageError for a disk that cannot hold it.
    """
    [cache] = _open((dataset,), spec, format, options)
    return cache


def open_caches(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, folder: str | Path | None, limit_bytes: int | None
) -> tuple[ChunkCache | None, ...]:
    """The cache of each of a loader's datasets, as `open_cache` opens one. No folder: no caches."""
    if folder is None:
        if limit_bytes is not None:
            raise UsageError(
                f"cache_limit_bytes = {limit_bytes} without cache_dir", "expected the folder of the cache", "give both"
            )
        return (None,) * len(datasets)
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise UsageError(f"cache_dir = {folder!r}", "expected a folder on a local disk", "omit it for no cache")
    return _open(datasets, spec, format, CacheOptions(str(folder), limit_bytes))


def _open(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, options: CacheOptions
) -> tuple[ChunkCache | None, ...]:
    """The remote ones share the folder and its limit, because windows of a mix hold chunks of all."""
    folder, limit = options.named
    check_folder(options.folder, folder)
    remote = list({dataset.pin: dataset for dataset in datasets if dataset.store.local_root is None}.values())
    for dataset in datasets:
        if dataset.store.local_root is not None:
            warnings.warn(
                f"{folder} = {options.folder!r} is not used: {dataset.pin.uri} is a folder of this machine already",
                RuntimeWarning,
                stacklevel=3,
            )
    if not remote:
        return (None,) * len(datasets)
    if options.limit_bytes is not None:
        check_limit(remote, spec, format, options.limit_bytes, limit)
    split_bytes = sum(int(dataset.index(spec.split, format).stored_bytes.sum()) for dataset in remote)
    quota = open_quota(options.folder, options.limit_bytes, split_bytes, named=folder)
    if options.limit_bytes is None:
        check_limit(remote, spec, format, quota.limit_bytes, f"{limit} (half of what the disk has free)")
    return tuple(
        ChunkCache(quota, dataset.store.uri) if dataset.store.local_root is None else None for dataset in datasets
    )


def check_folder(folder: str, named: str) -> None:
    """Raises UsageError for a URI."""
    if "://" in folder:
        raise UsageError(
            f"{named} = {folder!r}", "expected a folder on a local disk", "name one, or omit it for no cache"
        )


def check_limit(
    datasets: Sequence[Dataset], spec: PlanSpec, format: str, limit_bytes: int, named: str = "limit"
) -> None:
    """Raise UsageError for a limit below one shuffle window: each chunk would be evicted before it is used again."""
    sizes = np.concatenate([dataset.index(spec.split, format).stored_bytes for dataset in datasets])
    largest = int(sizes.max())
    needed = min(spec.window_chunks * spec.num_streams * largest, int(sizes.sum()))
    if limit_bytes < needed:
        raise UsageError(
            f"{named} = {limit_bytes}",
            f"expected at least {needed} bytes, one shuffle window of {spec.split!r}: {spec.num_streams} streams x "
            f"{spec.window_chunks} chunk(s) of up to {largest} bytes, or all of the split"
            + (f" of {len(datasets)} datasets" if len(datasets) > 1 else ""),
            f"set it to {needed} or more, or read without a cache",
        )
