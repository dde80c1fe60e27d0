"""What a store is: a root on some kind of storage, with every path below relative to it.

`shardmill.stores` opens one by its URI. The dataset commit stands on one primitive, `put_if_absent`: of any number of
writers, exactly one gets True.
"""

from __future__ import annotations

import errno
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from shardmill.errors import SecurityRefusal, StorageError

TEMPORARY_PREFIX = ".tmp-"
"""Names of files that are not published yet; a listing never shows them."""


class AccessDenied(StorageError):
    """One file may not be read; others of its store may."""


class NoSuchRoot(StorageError):
    """The bucket itself is not there."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a store knows of one file without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int = 0
    etag: str = ""


class Store(Protocol):
    """A root on one kind of storage. Paths are relative, `/`-separated, and stay below the root."""

    uri: str
    local_root: Path | None
    """The root as a folder that this machine's programs can open; None for remote storage."""

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError if there is none, StorageError for anything else.

        AccessDenied only if the refusal is known to concern this one file, as a POSIX mode does. An S3 403 may as well
        be expired credentials, which must not become a fact about an image: that is a plain StorageError.
        """
        ...

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        """`num_bytes` from `start`; fewer at the end of the file, none behind it. Raises as `read` does.

        Allocates no more than the file holds, whatever `num_bytes` says.
        """
        ...

    def put(self, path: str, data: bytes) -> None:
        """Publish a whole file atomically; an older file of that name is replaced."""
        ...

    def put_file(self, path: str, local_file: Path) -> None:
        """Publish a spooled local file atomically."""
        ...

    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Publish a whole file unless the name exists; True if this call made it. Atomic among all writers."""
        ...

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Every file below the folder `prefix`, in no particular order; nothing if there is no such folder.

        Raises StorageError if any part of it cannot be read: a listing is complete, or it fails.
        """
        ...

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        """What writers have begun below the folder `prefix` and not published: temporary files, unfinished uploads.

        A live writer publishes its own; what is old was left by a killed one.
        """
        ...

    def delete_unpublished(self, file: StoredFile) -> None:
        """Remove what `list_unpublished` gave; never a published file."""
        ...

    def stat(self, path: str) -> StoredFile | None:
        """Size and time of one file, or None if there is none."""
        ...

    def delete(self, path: str) -> None:
        """Remove one file; a file that is not there is not an error."""
        ...


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


_ACCESS_FIX = "check the path, its permissions and, for s3://, the AWS_* environment; then run it again"


@contextmanager
def as_storage_error(
    path: Path | str, num_bytes: int | None = None, *, denied: type[StorageError] = StorageError
) -> Iterator[None]:
    """Turn what a file system or S3 client raises into one StorageError line; only absence passes through.

    `denied` is the class raised for a lack of permission.
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
        raise kind(f"cannot access {path}{size}: {reason}", fix=_ACCESS_FIX) from error
    except Exception as error:
        # botocore and aiohttp raise their own families of exceptions; each means that the request failed.
        if type(error).__module__.split(".")[0] in ("botocore", "aiobotocore", "aiohttp"):
            raise StorageError(f"cannot access {path}: {error}", fix=_ACCESS_FIX) from error
        raise
