"""The interface of a store: a root on some kind of storage, with all paths relative to it.

`shardmill.stores` opens one by its URI. The dataset commit relies on one primitive, `put_if_absent`: of any number of
writers, exactly one gets True.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

TEMPORARY_PREFIX = ".tmp-"
"""Names of files that are not published yet; a listing never shows them."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The properties of one file that a store knows without reading it."""

    path: str
    size_bytes: int
    mtime_ns: int = 0
    etag: str = ""


class Store(Protocol):
    """A root on one kind of storage. Paths are relative, `/`-separated, and stay below the root."""

    uri: str
    local_root: Path | None
    """The root as a folder that this machine's programs can open; None for remote storage."""

    @property
    def deadline_seconds(self) -> float | None:
        """Time limit of a request including all retries. 0 if nothing is retried; None if another package decides and
        does not report it.
        """
        ...

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError if there is none, StorageError for anything else; IntegrityError if
        the storage itself says that these are not the bytes that it was given.

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
        """Publish a whole file unless the name exists; True if this call made it. Atomic among all writers.

        If an answer was lost, the bytes that are there may be all that tells: those of each writer must be its own.
        """
        ...

    def list(self, prefix: str) -> Iterator[StoredFile]:
        """Every file below the folder `prefix`, in no particular order; nothing if the folder does not exist.

        Raises StorageError if any part of it cannot be read: a listing is complete, or it fails.
        """
        ...

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        """List unpublished work of writers below the folder `prefix`: temporary files, unfinished uploads, empty
        folders.

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


@runtime_checkable
class ReadsIntoMemory(Protocol):
    """A store that can read to memory which was used before; most have the bytes from a client that makes its own."""

    def read_blocks(
        self, path: str, start: int, num_bytes: int, take: Callable[[int], np.ndarray]
    ) -> Iterator[np.ndarray]:
        """The bytes of `read_range`, as they come: each time all that have, so that they are looked at while they are
        in a processor's cache. They lie in one array of `take(number of bytes)`. Nothing comes behind the file's end.
        """
        ...


def is_temporary(path: str) -> bool:
    """Whether a path is that of a file which its writer has not published."""
    return path.rpartition("/")[2].startswith(TEMPORARY_PREFIX)


def join_uri(uri: str | Path, path: str) -> str:
    """The URI of `path` below the root `uri`."""
    return f"{str(uri).rstrip('/')}/{path}"
