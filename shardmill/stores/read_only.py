"""The base of read-only stores: each write is refused, with a hint at stores that support it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from shardmill.errors import StorageError
from shardmill.storage import StoredFile


class ReadOnlyStore:
    """The half of a `Store` that publishes; abstract. Each call raises StorageError (exit 4).

    There is no `put_if_absent`, so of two writers nobody could say which one has committed.
    """

    uri: str

    def put(self, path: str, data: bytes) -> None:
        self._refuse(path)

    def put_file(self, path: str, local_file: Path) -> None:
        self._refuse(path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._refuse(path)

    def list_unpublished(self, prefix: str) -> Iterator[StoredFile]:
        """Nobody writes here through us."""
        return iter(())

    def delete_unpublished(self, file: StoredFile) -> None:
        self._refuse(file.path)

    def delete(self, path: str) -> None:
        self._refuse(path)

    def _refuse(self, path: str) -> NoReturn:
        scheme = self.uri.partition("://")[0]
        raise StorageError(
            f"cannot write {self.uri}/{path}: {scheme}:// is read only",
            "expected a store with conditional writes; without them nothing can be committed",
            "read from here, and put dataset, models and work directory on a local path, s3://, gs://, az:// or hdfs://",
        )
