"""Opens a stored file, on any storage, as a seekable file for a format's reader."""

from __future__ import annotations

import io
from typing import BinaryIO

from shardmill.storage import Store, StoredFile
from shardmill.storage_errors import as_storage_error

# Remote files are fetched in blocks: few requests for a scan, little waste for a jump over a large member.
_BLOCK_BYTES = 1 << 20


def open_file(store: Store, file: StoredFile) -> BinaryIO:
    """A seekable file; a remote one is read by ranges, in blocks. Raises FileNotFoundError, StorageError."""
    if store.local_root is not None:
        with as_storage_error(store.local_root / file.path):
            return open(store.local_root / file.path, "rb")
    return io.BufferedReader(_RemoteFile(store, file), _BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    def __init__(self, store: Store, file: StoredFile) -> None:
        super().__init__()
        self._store, self._file, self._position = store, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        num_bytes = min(len(buffer), max(0, self._file.size_bytes - self._position))
        data = self._store.read_range(self._file.path, self._position, num_bytes) if num_bytes else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
