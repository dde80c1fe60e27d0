"""The room of a chunk cache: a folder for the cache alone, and its limit, which all processes keep together.

    CACHE_DIR/shardmill-cache-1/CACHEDIR.TAG            marks the folder as a cache; backups skip it
                                room                    an upper bound of the bytes in it; locked while it changes
                                <dataset>/<entry>       see `shardmill.dataset.chunk_cache`
                                <dataset>/.tmp-<entry>  being fetched, or left by a killed process

Only files with such names are ever deleted, and only in a folder with our tag.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shardmill.errors import StorageError
from shardmill.storage import TEMPORARY_PREFIX

FOLDER, TAG = "shardmill-cache-1", "CACHEDIR.TAG"
# https://bford.info/cachedir/
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# Chunks of shardmill datasets; safe to delete.\n"
_HELD = struct.Struct("<q")
_DATASET = re.compile("[0-9a-f]{16}")
_ENTRY = re.compile("[0-9a-f]{64}-[0-9]+")
# Whoever has the lock scans the cache at the most, unless it was stopped.
_WAIT_SECONDS = 30.0
# Of the limit: a scan of all entries makes room for many.
_KEPT_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class _File:
    """An entry of the cache, or one to be."""

    path: str
    num_bytes: int
    mtime_ns: int
    is_fetched: bool
    """Whether it is an entry, and may be evicted; a living process writes another one."""


class CacheRoom:
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


def open_room(cache_dir: str, limit_bytes: int | None, wanted_bytes: int, *, named: str = "cache_dir") -> CacheRoom:
    """The room below `cache_dir`, made if it is not there. `limit_bytes`: by default half of what the disk can give.

    `wanted_bytes`: what the reader would fill of it. `named`: the setting, for messages. Raises StorageError for a disk
    that cannot be written to or has not enough space, and for a folder that is not a cache's.
    """
    folder = Path(os.path.abspath(os.path.expanduser(cache_dir)))
    root = folder / FOLDER
    try:
        root.mkdir(parents=True, exist_ok=True)
        _tag(root, named)
        room = CacheRoom(root, 1 << 62)
        held, free = room.held_bytes(), shutil.disk_usage(root).free
    except OSError as error:
        raise StorageError(
            f"{named} = {cache_dir!r}: cannot write to {error.filename or root}: {error.strerror or error}",
            "expected a folder on a local disk that this process may write to",
            f"name another folder, or omit {named} to read without a cache",
        ) from None
    room.limit_bytes = (held + free) // 2 if limit_bytes is None else limit_bytes
    needed = min(room.limit_bytes, wanted_bytes) if limit_bytes is not None else 0
    if needed > held + free:
        raise StorageError(
            f"{named} = {cache_dir!r}: the cache would grow to {needed} bytes, and its disk has {free} free",
            f"expected {needed - held} bytes of free space in addition to the {held} bytes in the cache",
            f"free space, set a limit of at most {held + free} bytes, or name a folder on another disk",
        )
    return room


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
