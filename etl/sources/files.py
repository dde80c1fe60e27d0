"""The reader of sources in which each image is a file."""

from __future__ import annotations

import os

from shardmill.stores import open_store
from shardmill.stores.local import bring_near
from shardmill.values import SourceImage

# A request takes some 20 to 100 ms, of which the machine works one.
_NUM_REMOTE_READS = 16


class FileReader:
    """Reads `image.key` below the source root."""

    def __init__(self, uri: str) -> None:
        self._store = open_store(uri)
        self.num_parallel = 1 if self._store.local_root is not None else _NUM_REMOTE_READS

    def read(self, image: SourceImage) -> bytes:
        return self._store.read(image.key)

    def expect(self, image: SourceImage) -> None:
        """The disk reads it while images before it are decoded."""
        if self._store.local_root is not None:
            bring_near(os.path.join(self._store.local_root, image.key))

    def is_there(self, path: str) -> bool:
        return self._store.stat(path) is not None
