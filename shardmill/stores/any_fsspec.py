"""A read-only store of any kind that fsspec supports: other clouds, FTP, SFTP, WebHDFS, each by its own package."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from shardmill.errors import UsageError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.stores.read_only import ReadOnlyStore


class FsspecStore(ReadOnlyStore):
    """`scheme://...` as fsspec's own tools take it; who asks, and where, is for the scheme's package to say."""

    deadline_seconds = None

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.local_root: Path | None = None

    def read(self, path: str) -> bytes:
        with self._errors(path):
            return self._system.cat_file(self._name(path))

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        with self._errors(path):
            # Some file systems allocate what they are asked for.
            end = min(start + num_bytes, int(self._system.info(self._name(path))["size"]))
            return self._system.cat_file(self._name(path), start=start, end=end) if start < end else b""

    def stat(self, path: str) -> StoredFile | None:
        try:
            with self._errors(path):
                found = self._system.info(self._name(path))
        except FileNotFoundError:
            return None
        return None if found["type"] == "directory" else self._stored_file(found)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        # `find` of fsspec leaves out what it cannot read.
        folders = [self._name(prefix)]
        while folders:
            folder = folders.pop()
            try:
                with self._errors(prefix):
                    entries = self._system.ls(folder, detail=True)
            except FileNotFoundError:
                continue
            for entry in entries:
                if entry["type"] != "directory":
                    yield self._stored_file(entry)
                elif entry["name"].rstrip("/") != folder.rstrip("/"):
                    folders.append(entry["name"])

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the root in it. Connects, so not before it is needed."""
        from fsspec.core import url_to_fs

        try:
            with as_storage_error(self.uri):
                return url_to_fs(self.uri)
        except (ImportError, ValueError) as error:
            scheme = self.uri.partition("://")[0]
            raise UsageError(
                f"no storage for {scheme}:// (given {self.uri!r})", f"fsspec says: {error}", "install what it names"
            ) from None

    @property
    def _system(self) -> Any:
        return self._place[0]

    def _name(self, path: str) -> str:
        root = self._place[1].rstrip("/")
        return f"{root}/{path}".rstrip("/") if path else root or "/"

    def _stored_file(self, found: dict[str, Any]) -> StoredFile:
        path = found["name"].lstrip("/").removeprefix(self._place[1].strip("/")).lstrip("/")
        # Under the names that fsspec's own file systems use.
        changed = found.get("mtime") or found.get("LastModified") or found.get("last_modified") or found.get("updated")
        if isinstance(changed, datetime):
            changed = changed.timestamp()
        is_time = isinstance(changed, int | float)
        etag = str(found.get("ETag") or found.get("etag") or "").strip('"')
        return StoredFile(path, int(found["size"] or 0), int(changed * 1e9) if is_time else 0, etag)

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        with as_storage_error(f"{self.uri}/{path}".rstrip("/")):
            try:
                yield
            except (IsADirectoryError, NotADirectoryError) as error:
                raise FileNotFoundError(errno.ENOENT, "it is no file") from error
