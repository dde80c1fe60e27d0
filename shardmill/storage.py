"""The only file that knows `file://` and `s3://`: a store is a root, and every path below is relative to it.

The dataset commit stands on one primitive of it, `put_if_absent`: of any number of writers, exactly one is told True.
Local: a synced temporary file, `os.link`, a synced folder. S3: PUT with `If-None-Match: *`.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import tempfile
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from shardmill.errors import SecurityRefusal, StorageError, UsageError

TEMPORARY_PREFIX = ".tmp-"


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
        """Every file below the folder `prefix`, in no particular order; nothing where there is no such folder."""
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
        with self._temporary_beside(target, len(data)) as (file, temporary):
            file.write(data)
            _sync(file)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_file(self, path: str, local_file: Path) -> None:
        target = self._root / path
        with self._temporary_beside(target, local_file.stat().st_size) as (file, temporary):
            with open(local_file, "rb") as source:
                while block := source.read(1 << 20):
                    file.write(block)
            _sync(file)
            os.replace(temporary, target)
            _sync_folder(target.parent)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        target = self._root / path
        with self._temporary_beside(target, len(data)) as (file, temporary):
            file.write(data)
            _sync(file)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            _sync_folder(target.parent)
            return True

    def list(self, prefix: str) -> Iterator[StoredFile]:
        folder = self._root / prefix
        for directory, _, names in os.walk(folder):
            for name in names:
                if not name.startswith(TEMPORARY_PREFIX):
                    file = Path(directory, name)
                    found = self.stat(str(file.relative_to(self._root)))
                    if found is not None:
                        yield found

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(self._root / path):
                status = os.stat(self._root / path)
        except FileNotFoundError:
            return None
        return StoredFile(path, status.st_size, status.st_mtime_ns)

    def delete(self, path: str) -> None:
        with as_storage_error(self._root / path):
            (self._root / path).unlink(missing_ok=True)

    @contextmanager
    def _temporary_beside(self, target: Path, num_bytes: int) -> Iterator[tuple[IO[bytes], str]]:
        with as_storage_error(target, num_bytes):
            target.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=TEMPORARY_PREFIX)
            try:
                # mkstemp makes private files; a dataset is read by other users of the group.
                os.fchmod(descriptor, 0o640)
                with os.fdopen(descriptor, "wb") as file:
                    yield file, temporary
            finally:
                Path(temporary).unlink(missing_ok=True)


class S3Store:
    """A prefix of an S3 bucket. Endpoint, region and credentials come from the usual AWS_* environment."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self._root = self.uri[len("s3://") :]
        self._is_conditional = False

    def read(self, path: str) -> bytes:
        with as_storage_error(f"{self.uri}/{path}"):
            return _s3_filesystem().cat_file(f"{self._root}/{path}")

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        if num_bytes == 0:
            return b""
        with as_storage_error(f"{self.uri}/{path}"):
            return _s3_filesystem().cat_file(f"{self._root}/{path}", start=start, end=start + num_bytes)

    def put(self, path: str, data: bytes) -> None:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            _s3_filesystem().pipe_file(f"{self._root}/{path}", data)

    def put_file(self, path: str, local_file: Path) -> None:
        with as_storage_error(f"{self.uri}/{path}", local_file.stat().st_size), self._needs_bucket():
            _s3_filesystem().put_file(str(local_file), f"{self._root}/{path}")

    def put_if_absent(self, path: str, data: bytes) -> bool:
        with as_storage_error(f"{self.uri}/{path}", len(data)), self._needs_bucket():
            self._check_conditional()
            return self._create(path, data)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        with as_storage_error(f"{self.uri}/{prefix}"), self._needs_bucket():
            folder = f"{self._root}/{prefix}".rstrip("/")
            found = _s3_filesystem().find(folder, detail=True, refresh=True)
        for name, info in found.items():
            # Consoles make empty objects with a slash at the end, to show as folders.
            if not name.endswith("/"):
                yield _stored_file(name[len(self._root) + 1 :], info)

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                return _stored_file(path, _s3_filesystem().info(f"{self._root}/{path}", refresh=True))
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        try:
            with as_storage_error(f"{self.uri}/{path}"):
                _s3_filesystem().rm_file(f"{self._root}/{path}")
        except FileNotFoundError:
            return

    def _create(self, path: str, data: bytes) -> bool:
        try:
            _s3_filesystem().pipe_file(f"{self._root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def _check_conditional(self) -> None:
        """Raise StorageError for a server that ignores `If-None-Match`: there, two writers would both be told True."""
        if self._is_conditional:
            return
        probe = f"{TEMPORARY_PREFIX}conditional-put-{uuid.uuid4().hex}"
        try:
            answers = [self._create(probe, b"1"), self._create(probe, b"2")]
        finally:
            self.delete(probe)
        if answers != [True, False]:
            raise StorageError(
                f"{self.uri} ignores `If-None-Match: *`",
                "expected a store with conditional PUT; without it nothing can be committed safely",
                "upgrade the server, or choose another place; reading from this one works",
            )
        self._is_conditional = True

    @contextmanager
    def _needs_bucket(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            bucket = self._root.split("/")[0]
            raise NoSuchRoot(f"no bucket {bucket!r} for {self.uri}", "expected an existing one", "create it") from None


# hdfs:// is the next entry (docs/decisions/0004).
STORES: dict[str, Callable[[str], Store]] = {"file": LocalStore, "s3": S3Store}


@functools.cache
def _s3_filesystem() -> Any:
    try:
        import s3fs
    except ImportError:
        raise UsageError(
            "s3:// needs the package s3fs", "which is not installed", "pip install 'shardmill[s3]'"
        ) from None
    # A listing that is remembered would hide what other processes have just committed.
    return s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)


def _stored_file(path: str, info: dict[str, Any]) -> StoredFile:
    modified = info.get("LastModified")
    mtime_ns = int(modified.timestamp() * 1e9) if modified is not None else 0
    return StoredFile(path, int(info["size"]), mtime_ns, str(info.get("ETag", "")).strip('"'))


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
