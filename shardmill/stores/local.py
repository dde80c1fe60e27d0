"""A store in a folder of a POSIX file system: published files are synced, then linked or renamed into place."""

from __future__ import annotations

import os
import stat
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from shardmill.errors import AccessDenied, StorageError
from shardmill.memory import read_blocks
from shardmill.storage import TEMPORARY_PREFIX, StoredFile
from shardmill.storage_errors import as_storage_error

if TYPE_CHECKING:
    import numpy as np

_MAX_TRIES = 100


class LocalStore:
    """A folder of a POSIX file system."""

    deadline_seconds = 0.0

    def __init__(self, uri: str) -> None:
        path = urllib.parse.unquote(uri[len("file://") :]) if uri.startswith("file://") else uri
        self._root = Path(os.path.abspath(os.path.expanduser(path)))
        self.uri = str(self._root)
        self.local_root: Path | None = self._root
        self._prefix = os.path.join(self._root, "")

    def read(self, path: str) -> bytes:
        # The hot path of small images, where pathlib, a file object or a context manager takes as long as the read.
        name = self._prefix + path
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return _read_all(descriptor)
            finally:
                os.close(descriptor)
        except OSError:
            with as_storage_error(name, denied=AccessDenied):
                raise

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        with as_storage_error(self._root / path), open(self._root / path, "rb") as file:
            # `pread` allocates what it is asked for; no more than the file holds may be asked for on an index's word.
            left = max(0, os.fstat(file.fileno()).st_size - start)
            return os.pread(file.fileno(), min(num_bytes, left), start)

    def read_blocks(
        self, path: str, start: int, num_bytes: int, take: Callable[[int], np.ndarray]
    ) -> Iterator[np.ndarray]:
        name = self._prefix + path
        with as_storage_error(name), open(name, "rb", buffering=0) as file:
            yield from read_blocks(file.fileno(), start, num_bytes, take)

    def put(self, path: str, data: bytes) -> None:
        target = self._root / path
        with _temporary_beside(target, len(data)) as (file, temporary):
            file.write(data)
            _sync(file)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_file(self, path: str, local_file: Path) -> None:
        target = self._root / path
        with _temporary_beside(target, local_file.stat().st_size) as (file, temporary):
            with open(local_file, "rb") as source:
                while block := source.read(1 << 20):
                    file.write(block)
            _sync(file)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / path
        with _temporary_beside(target, len(data)) as (file, temporary):
            file.write(data)
            _sync(file)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
            return True

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return self._walk(prefix, lambda name: not name.startswith(TEMPORARY_PREFIX))

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        yield from self._walk(prefix, lambda name: name.startswith(TEMPORARY_PREFIX))
        # A folder is made just before its first file: one that stays empty is of a writer that was killed between.
        for directory, folders, names in os.walk(self._root / prefix):
            if not folders and not names:
                with suppress(FileNotFoundError):
                    status = os.stat(directory)
                    yield StoredFile(str(Path(directory).relative_to(self._root)), 0, status.st_mtime_ns)

    def delete_unpublished(self, file: StoredFile) -> None:
        if (self._root / file.path).is_dir():
            self._remove_empty(self._root / file.path)
        else:
            self.delete(file.path)

    def _walk(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[StoredFile]:
        top = self._root / prefix

        def refuse(error: OSError) -> None:
            # A folder that is not there holds nothing; one that cannot be read may hold anything.
            if not isinstance(error, FileNotFoundError):
                with as_storage_error(error.filename or top):
                    raise error

        for directory, _, names in os.walk(top, onerror=refuse):
            below = Path(directory).relative_to(self._root).as_posix()
            before = "" if below == "." else f"{below}/"
            found = (self.stat(before + name) for name in names if is_wanted(name))
            yield from (file for file in found if file is not None)

    def stat(self, path: str) -> StoredFile | None:
        # A listing asks for very many: without a `Path` for each.
        target = f"{self._root}/{path}"
        try:
            status = os.stat(target)
        except FileNotFoundError:
            return None
        except OSError:
            with as_storage_error(target):
                raise
        return None if stat.S_ISDIR(status.st_mode) else StoredFile(path, status.st_size, status.st_mtime_ns)

    def delete(self, path: str) -> None:
        target = self._root / path
        with as_storage_error(target):
            target.unlink(missing_ok=True)
        # Folders go with their last file: checkpoints come and go by the thousand.
        self._remove_empty(target.parent)

    def _remove_empty(self, folder: Path) -> None:
        """This folder and those above it, up to the first that is not empty."""
        while folder != self._root and _is_removed(folder):
            folder = folder.parent


@contextmanager
def _temporary_beside(target: Path, num_bytes: int) -> Iterator[tuple[IO[bytes], Path]]:
    with as_storage_error(target, num_bytes):
        file, temporary = _create_beside(target)
        try:
            with file:
                yield file, temporary
        finally:
            temporary.unlink(missing_ok=True)


def _create_beside(target: Path) -> tuple[IO[bytes], Path]:
    """A new file in `target`'s folder, with the permissions that the umask leaves (`tempfile` makes private ones)."""
    temporary = target.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    for _ in range(_MAX_TRIES):
        try:
            _make_folder(target.parent)
            return open(temporary, "xb"), temporary
        except FileNotFoundError:
            # A concurrent `delete` removed the empty folder, or none can be made there, as in /proc.
            continue
    raise StorageError(f"cannot write {target}", "its folder cannot be created, or is removed repeatedly")


def _read_all(descriptor: int) -> bytes:
    """One byte more than the file should have is asked for: if it does not come, that was all of it."""
    num_bytes = os.fstat(descriptor).st_size
    data = os.read(descriptor, num_bytes + 1)
    if len(data) == num_bytes:
        return data
    pieces = [data]
    while data := os.read(descriptor, 1 << 20):
        pieces.append(data)
    return b"".join(pieces)


def bring_near(name: str) -> None:
    """Let the disk begin to read a file that is opened soon. Raises nothing: opening it shows the problem."""
    with suppress(OSError):
        # A pipe has no reader to wait for.
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)


_synced_names: dict[Path, tuple[int, int]] = {}
"""Folders whose names this process has synced into the folders above them: device and inode."""


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents; each name is synced into the folder above: a crash loses none of them."""
    is_new = True
    try:
        os.mkdir(folder)
    except FileExistsError:
        is_new = False
    except FileNotFoundError:
        _make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
    if is_new or not _is_name_synced(folder):
        _sync_name(folder, is_new)


def _is_name_synced(folder: Path) -> bool:
    known = _synced_names.get(folder)
    if known is None:
        return False
    found = os.stat(folder)
    return known == (found.st_dev, found.st_ino)


def _sync_name(folder: Path, is_new: bool) -> None:
    """Also that of each folder above: who has made it may not have synced it yet."""
    if folder.parent == folder:
        return
    try:
        found = os.stat(folder)
        _sync_folder(folder.parent)
    except OSError:
        # A folder that others have made may lie in one that is not ours to read.
        if is_new:
            raise
    else:
        _synced_names[folder] = (found.st_dev, found.st_ino)
        if not _is_name_synced(folder.parent):
            _sync_name(folder.parent, is_new=False)


def _is_removed(folder: Path) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        # Not empty, or not ours to remove. Either way the file itself is gone, as asked.
        return False
    _synced_names.pop(folder, None)
    return True


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
