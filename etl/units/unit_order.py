"""Restores the order of a unit's rows if they were read in another one; rows that do not fit in memory wait in
a file.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import IO

from shardmill.errors import StorageError
from shardmill.formats.rows import StoredRow
from shardmill.storage_errors import as_storage_error


@dataclass(slots=True)
class _Waiting:
    """A row whose turn has not come."""

    split: str
    row: StoredRow
    """Without its image, if that is in the file."""
    start: int = 0
    """Offset of its image in the file."""
    num_bytes: int = 0


def in_unit_order(
    rows: Iterable[tuple[str, StoredRow]], order: Iterable[str], max_bytes: int, folder: str
) -> Iterator[tuple[str, StoredRow]]:
    """Each row, with the name of its split, in the `order` of its keys. All of `rows` are taken before the first comes.

    Images of `max_bytes` are in memory; more of them are in an unnamed file in `folder`, the system's temporary folder
    if it is empty. Raises StorageError if that is full.
    """
    waiting: dict[str, _Waiting] = {}
    in_memory: list[_Waiting] = []
    num_bytes = 0
    with _Images(folder) as images:
        for split, row in rows:
            waiting[row.source.key] = _Waiting(split, row)
            in_memory.append(waiting[row.source.key])
            num_bytes += row.image_bytes
            if num_bytes > max_bytes:
                images.take(in_memory)
                in_memory, num_bytes = [], 0
        if images.has_any:
            # What the caller collects takes as much memory again.
            images.take(in_memory)
        del in_memory
        for key in order:
            if key in waiting:
                found = waiting.pop(key)
                yield found.split, images.whole(found)


class _Images:
    """The file of images, made when it is needed; nobody else sees it, and it ends with this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder or tempfile.gettempdir()
        self._file: IO[bytes] | None = None

    def __enter__(self) -> _Images:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def has_any(self) -> bool:
        return self._file is not None

    def take(self, rows: Iterable[_Waiting]) -> None:
        """Move the rows' images to the end of the file."""
        if self._file is None:
            self._file = self._opened()
        with as_storage_error(self._folder):
            for each in rows:
                each.start, each.num_bytes = self._file.tell(), self._file.write(each.row.sample.image)
                each.row = replace(each.row, sample=replace(each.row.sample, image=b""))

    def _opened(self) -> IO[bytes]:
        try:
            with as_storage_error(self._folder):
                return tempfile.TemporaryFile(dir=self._folder)
        except FileNotFoundError:
            raise StorageError(
                f"{self._folder} does not exist on host {socket.gethostname()}",
                "expected etl.scratch_dir on every host that writes shards",
                "create it there, or set etl.scratch_dir to another folder",
            ) from None

    def whole(self, waiting: _Waiting) -> StoredRow:
        """The row with its image."""
        if self._file is None:
            return waiting.row
        with as_storage_error(self._folder):
            self._file.seek(waiting.start)
            image = self._file.read(waiting.num_bytes)
        return replace(waiting.row, sample=replace(waiting.row.sample, image=image))
