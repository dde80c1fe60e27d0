"""Growing files in any store: `events.jsonl`, `steps.jsonl` and the scalars of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from shardmill.sealed import check_relative_path
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error


class GrowingFile:
    """A file that grows. Local: what was appended is there at once. Elsewhere: the object is rewritten now and then.

    A store has no append; rewriting costs time that grows with the file, so its rate is held to a share of it.
    """

    REWRITE_SHARE = 0.05

    def __init__(self, store: Store, path: str, kept: bytes = b"", clock: Callable[[], float] = time.monotonic) -> None:
        """`kept`: what an object of that name holds already, if it should stay; a local file is only added to."""
        self._store = store
        self._path = check_relative_path(path)
        self._clock = clock
        self._next_rewrite = 0.0
        self._file: IO[bytes] | None = None
        self._parts = [kept]
        if store.local_root is not None:
            self._file = open_to_append(store.local_root / path)

    def append(self, data: bytes) -> None:
        """Add bytes at the end; a local reader sees all of them or none."""
        if self._file is not None:
            with as_storage_error(self._path, len(data)):
                self._file.write(data)
            return
        self._parts.append(data)
        if self._clock() >= self._next_rewrite:
            self._rewrite()

    def close(self) -> None:
        """Nothing is left to write after this."""
        if self._file is not None:
            self._file.close()
        elif any(self._parts):
            self._rewrite()

    def _rewrite(self) -> None:
        started = self._clock()
        self._store.put(self._path, b"".join(self._parts))
        ended = self._clock()
        self._next_rewrite = ended + max(1.0, (ended - started) / self.REWRITE_SHARE)


class LineLog:
    """A growing file of JSON lines."""

    def __init__(self, store: Store, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        kept = b"" if store.local_root is not None else b"".join(read_lines(store, path))
        self._file = GrowingFile(store, path, kept, clock)

    def append(self, value: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.append(json.dumps(value).encode() + b"\n")

    def close(self) -> None:
        """Nothing is left to write after this."""
        self._file.close()


def open_to_append(target: Path) -> IO[bytes]:
    """A growing local file, made with its folder if need be. Raises StorageError if it cannot be."""
    with as_storage_error(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered and in append mode: a line is whole for every reader, whatever then happens to this process.
        return open(target, "ab", buffering=0)


def read_lines(store: Store, path: str) -> list[bytes]:
    """The whole lines of a line log, each with its end; a last line that a kill cut short is left out."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return []
    return [line for line in data.splitlines(keepends=True) if line.endswith(b"\n")]
