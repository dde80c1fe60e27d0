"""The reader of sources whose images are files of their own."""

from __future__ import annotations

from shardmill.stores import open_store
from shardmill.values import SourceImage


class FileReader:
    """Reads `image.key` below the source root."""

    def __init__(self, uri: str) -> None:
        self._store = open_store(uri)

    def read(self, image: SourceImage) -> bytes:
        return self._store.read(image.key)

    def is_there(self, path: str) -> bool:
        return self._store.stat(path) is not None
