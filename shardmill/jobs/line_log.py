"""A growing file of JSON lines in any store: `events.jsonl` and `steps.jsonl` of a run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from shardmill.sealed import check_relative_path
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error


class LineLog:
    """A growing file of JSON lines. Local: each line is there at once. Elsewhere: the object is rewritten now and then.

    A store has no append; rewriting costs time that grows with the file, so its rate is held to a share of it.
    """

    REWRITE_SHARE = 0.05

    def __init__(self, store: Store, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._path = check_relative_path(path)
        self._clock = clock
        self._next_rewrite = 0.0
        self._file: IO[bytes] | None = None
        self._lines: list[bytes] = []
        if store.local_root is not None:
            target = store.local_root / path
            self._file = open_to_append(target)
        else:
            self._lines = read_lines(store, path)

    def append(self, value: Mapping[str, Any]) -> None:
        """Add one line."""
        line = json.dumps(value).encode() + b"\n"
        if self._file is not None:
            with as_storage_error(self._path, len(line)):
                self._file.write(line)
            return
        self._lines.append(line)
        if self._clock() >= self._next_rewrite:
            self._rewrite()

    def close(self) -> None:
        """Nothing is left to write after this."""
        if self._file is not None:
            self._file.close()
        elif self._lines:
            self._rewrite()

    def _rewrite(self) -> None:
        started = self._clock()
        self._store.put(self._path, b"".join(self._lines))
        ended = self._clock()
        self._next_rewrite = ended + max(1.0, (ended - started) / self.REWRITE_SHARE)


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
