"""Lists the files that `predict` is given: folders are expanded, and anything but a regular file is a rejection."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence

from shardmill.errors import UsageError
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason


def list_files(paths: Sequence[str]) -> list[str]:
    """The paths themselves; in place of a folder (or `s3://` prefix), all files below it that are not hidden, sorted.

    Raises UsageError if nothing is left.
    """
    files = [file for path in paths for file in _files_of(path)]
    if not files:
        raise UsageError(
            f"no files below {', '.join(paths)}",
            "expected image files, or folders that contain some",
            "check the paths",
        )
    return files


def read_file(path: str, max_bytes: int) -> bytes | Rejection:
    """The bytes of a regular file (or an object on S3) of at most `max_bytes`, or why they are not read."""
    return _read_object(path, max_bytes) if "://" in path else _read_local(path, max_bytes)


def _files_of(path: str) -> Iterator[str]:
    if "://" in path:
        folder, _, name = path.rstrip("/").rpartition("/")
        store = open_store(folder)
        below = [] if store.stat(name) is not None else sorted(file.path for file in store.list(name))
        yield from (f"{folder}/{each}" for each in below if not _is_hidden(each[len(name) :]))
        if not below:
            yield path
    elif os.path.isdir(path):
        # A folder that cannot be listed stays in the list: it is rejected by its own name.
        unlisted: list[str] = []
        found = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(path, onerror=lambda error: unlisted.append(error.filename))
            for name in names
        ]
        yield from sorted([each for each in found if not _is_hidden(os.path.relpath(each, path))] + unlisted)
    else:
        yield path


def _is_hidden(relative: str) -> bool:
    return any(part.startswith(".") for part in relative.split("/"))


def _read_local(path: str, max_bytes: int) -> bytes | Rejection:
    try:
        # Without waiting: opening a FIFO would hang until another process writes to it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return _rejection(path, RejectReason.NOT_REGULAR_FILE, stat.filemode(status.st_mode))
            if status.st_size > max_bytes:
                return _too_large(path, status.st_size, max_bytes)
            # Files of /proc say that they are empty, and growing ones soon say something else.
            data = file.read(max_bytes + 1)
            return _too_large(path, len(data), max_bytes) if len(data) > max_bytes else data
    except FileNotFoundError:
        return _rejection(path, RejectReason.MISSING, "no such file")
    except OSError as error:
        if os.path.isdir(path):
            return _rejection(path, RejectReason.NOT_REGULAR_FILE, f"a folder: {error.strerror}")
        return _rejection(path, RejectReason.UNREADABLE, error.strerror or str(error))


def _read_object(path: str, max_bytes: int) -> bytes | Rejection:
    folder, _, name = path.rpartition("/")
    store = open_store(folder)
    found = store.stat(name)
    if found is None:
        return _rejection(path, RejectReason.MISSING, "no such file")
    return _too_large(path, found.size_bytes, max_bytes) if found.size_bytes > max_bytes else store.read(name)


def _rejection(path: str, reason: RejectReason, detail: str) -> Rejection:
    return Rejection(path, reason, detail, stage="read")


def _too_large(path: str, num_bytes: int, max_bytes: int) -> Rejection:
    detail = f"{num_bytes} bytes; max_source_bytes is {max_bytes}"
    return Rejection(path, RejectReason.TOO_LARGE_BYTES, detail, num_bytes, stage="read")
