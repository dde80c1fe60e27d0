"""A local store that counts the bytes which are read from it: `counted:///folder`, entered into `STORES` by a test."""

from __future__ import annotations

from collections import Counter

from shardmill.stores.local import LocalStore

BYTES_READ: Counter[str] = Counter()
"""Path -> bytes, since it was last cleared."""


class CountingStore(LocalStore):
    def __init__(self, uri: str) -> None:
        super().__init__(uri.replace("counted://", "file://"))

    def read(self, path: str) -> bytes:
        data = super().read(path)
        BYTES_READ[path] += len(data)
        return data

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        data = super().read_range(path, start, num_bytes)
        BYTES_READ[path] += len(data)
        return data
