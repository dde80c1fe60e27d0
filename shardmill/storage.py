"""The only place that knows `file://` and `s3://`: a store is a root, and every path below is relative to it.

The dataset commit stands on one primitive of it, `put_if_absent`: of any number of writers, exactly one is told True.
Local: a synced temporary file, `os.link`, a synced folder. S3: PUT with `If-None-Match: *`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from shardmill.errors import SecurityRefusal, StorageError, UsageError

TEMPORARY_PREFIX = ".tmp-"
_MAX_TRIES = 100


class AccessDenied(StorageError):
    """One file may not be read; others of its store may."""


class NoSuchRoot(StorageError):
    """The bucket itself is not there."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a store tells of one file without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int = 0
    etag: str = ""


class Store(Protocol):
    """A root on one kind of storage. Paths are relative, `/`-separated, and stay below the root."""

    uri: str

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError where there is none, StorageError for anything else."""
        ...

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start`; fewer at the end of the file. Raises as `read` does."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Publish a whole file at once; an older file of that name is replaced."""
        ...

    def put_file(self, path: str, local_file: Path) -> None:
        """Publish a spooled local file at once."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Publish a whole file unless the name exists; True if this call made it. Atomic among all writers."""
        ...

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Every file below the folder `prefix`, in no particular order; nothing if there is no such folder.

        Raises StorageError if any of it cannot be read: a listing is whole, or it is none.
        """
        ...

    def stat(self, path: str) -> StoredFile | None:
        """Size and time of one file, or None where there is none."""
        ...

    def delete(self, path: str) -> None:
        """Remove one file; a file that is not there is not an error."""
        ...


def open_store(uri: str | Path) -> Store:
    """The store rooted at a local path, `file://` or `s3://` URI. Raises UsageError for another scheme."""
    text = str(uri)
    scheme = text.split("://", 1)[0] if "://" in text else "file"
    if scheme not in STORES:
        raise UsageError(
            f"no storage for {scheme}:// (given {text!r})",
            f"expected a local path or one of {', '.join(f'{name}://' for name in STORES)}",
        )
    return STORES[scheme](text)


def join_uri(uri: str | Path, path: str) -> str:
    """The URI of `path` below the root `uri`."""
    return f"{str(uri).rstrip('/')}/{path}"


def check_relative_path(path: str) -> str:
    """`path` itself, if it can only lead below its root. Raises SecurityRefusal otherwise."""
    parts = path.split("/")
    decoded = urllib.parse.unquote(path)
    hostile = (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or ".." in decoded.split("/")
        or "\\" in decoded
        or any(ord(character) < 32 for character in decoded)
        or re.match(r"^[A-Za-z]:|^[A-Za-z][A-Za-z0-9+.-]*://", decoded) is not None
        or decoded.startswith(("/", "~"))
    )
    if hostile:
        raise SecurityRefusal(
            f"the path {path!r} does not stay under its root",
            "expected a relative, normalised path",
            "do not use this dataset; find out who wrote it",
        )
    return path


class LocalStore:
    """A folder of a POSIX file system."""

    def __init__(self, uri: str) -> None:
        path = urllib.parse.unquote(uri[len("file://") :]) if uri.startswith("file://") else uri
        self._root = Path(os.path.abspath(os.path.expanduser(path)))
        self.uri = str(self._root)

    def read(self, path: str) -> bytes:
        with as_storage_error(self._root / path, denied=AccessDenied), open(self._root / path, "rb") as file:
            return file.read()

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        with as_storage_error(self._root / path), open(self._root / path, "rb") as file:
            return os.pread(file.fileno(), num_bytes, start)

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
        top = self._root / prefix

        def refuse(error: OSError) -> None:
            # A folder that is not there holds nothing; one that cannot be read may hold anything.
            if not isinstance(error, FileNotFoundError):
                with as_storage_error(error.filename or top):
                    raise error

        for directory, _, names in os.walk(top, onerror=refuse):
            for name in names:
                if not name.startswith(TEMPORARY_PREFIX):
                    found = self.stat(str(Path(directory, name).relative_to(self._root)))
                    if found is not None:
                        yield found

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(self._root / path):
                status = os.stat(self._root / path)
        except FileNotFoundError:
            return None
        return None if stat.S_ISDIR(status.st_mode) else StoredFile(path, status.st_size, status.st_mtime_ns)

    def delete(self, path: str) -> None:
        target = self._root / path
        with as_storage_error(target):
            target.unlink(missing_ok=True)
        # Folders go with their last file: checkpoints come and go by the thousand.
        for folder in target.parents:
            if folder == self._root or not _is_removed(folder):
                return


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
            # A `delete` took the empty folder away in between; or nobody can make one there, as in /proc.
            continue
    raise StorageError(f"cannot write {target}", "its folder cannot be made, or vanishes again and again")


def _make_folder(folder: Path) -> None:
    """Make `folder` and its parents; each new name is synced into the folder above: a crash loses none of them."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        _make_folder(folder.parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
    _sync_folder(folder.parent)


def _is_removed(folder: Path) -> bool:
    try:
        os.rmdir(folder)
    except OSError:
        # Not empty, or not ours to remove: the file is gone, and that is what was asked for.
        return False
    return True


def _open_s3(uri: str) -> Store:
    # Loaded on first use: s3_store is written in terms of this module.
    from shardmill.s3_store import S3Store

    return S3Store(uri)


# hdfs:// is the next entry (docs/decisions/0004).
STORES: dict[str, Callable[[str], Store]] = {"file": LocalStore, "s3": _open_s3}


@contextmanager
def as_storage_error(
    path: Path | str, num_bytes: int | None = None, *, denied: type[StorageError] = StorageError
) -> Iterator[None]:
    """Turn what a file system or S3 client raises into one StorageError line; only absence passes through.

    `denied` is raised where permission is lacking.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        size = "" if num_bytes is None else f" ({num_bytes} bytes)"
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(
                f"no room to write {path}{size}: {reason}", "nothing was published", "free space, then run it again"
            ) from error
        kind = denied if isinstance(error, PermissionError) else StorageError
        raise kind(f"cannot access {path}{size}: {reason}") from error
    except Exception as error:
        # botocore and aiohttp raise their own families of exceptions; each means that the store did not answer well.
        if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "aiohttp"):
            raise StorageError(f"cannot access {path}: {error}") from error
        raise


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
