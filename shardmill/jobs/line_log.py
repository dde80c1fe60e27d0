"""Growing files in any store: `events.jsonl`, `steps.jsonl` and the scalars of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from shardmill.errors import StorageError
from shardmill.jobs.redact import redacted_text
from shardmill.sealed import check_relative_path
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error

REWRITE_SHARE = 0.05

Warn = Callable[[str], None]


def warn_on_stderr(sentence: str) -> None:
    """For logs of which no observer is told."""
    sys.stderr.write(f"WARNING: {redacted_text(sentence)}\n")


def pause_seconds(seconds: float) -> float:
    """How long to leave a store alone after a call of so many seconds, which held up the work that is logged."""
    return max(1.0, seconds / REWRITE_SHARE)


class GrowingFile:
    """A file that grows. Local: what was appended is there at once. Elsewhere: the object is rewritten now and then.

    A store has no append; rewriting costs time that grows with the file, so its rate is held to a share of it.

    A store that refuses it (a full disk, an outage) does not end what is logged: `warn` is told once, and what is
    missing is tried again with later appends and at the end.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        kept: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
        warn: Warn = warn_on_stderr,
    ) -> None:
        """`kept`: what an object of that name holds already, if it should stay; a local file is only added to.

        Raises StorageError if a local file cannot be made.
        """
        self._store = store
        self._path = check_relative_path(path)
        self._clock = clock
        self._warn = warn
        self._next_rewrite = 0.0
        self._is_refused = False
        self._file: IO[bytes] | None = None
        self._parts = [kept]
        """The whole object; of a local file what is not written yet."""
        if store.local_root is not None:
            self._file = open_to_append(store.local_root / path)
            self._parts = []

    def append(self, data: bytes) -> None:
        """Add bytes at the end; a local reader sees all of them or none."""
        self._parts.append(data)
        if self._file is not None or self._clock() >= self._next_rewrite:
            self._write(f"{self._path} is behind, and is tried again")

    def close(self) -> None:
        """Nothing is left to write after this."""
        if any(self._parts):
            self._is_refused = False
            self._write(f"{self._path} lacks its last part")
        if self._file is not None:
            self._file.close()

    def _write(self, if_refused: str) -> None:
        started = self._clock()
        was_refused, self._is_refused = self._is_refused, False
        try:
            if self._file is not None:
                self._add_to(self._file)
            else:
                self._store.put(self._path, b"".join(self._parts))
        except StorageError as error:
            self._is_refused = True
            if not was_refused:
                self._warn(f"{if_refused}: {error.what}")
        ended = self._clock()
        self._next_rewrite = ended + pause_seconds(ended - started)

    def _add_to(self, file: IO[bytes]) -> None:
        data, self._parts = b"".join(self._parts), []
        try:
            while data:
                with as_storage_error(self._path, len(data)):
                    # A disk that becomes full takes a part.
                    data = data[file.write(data) :]
        finally:
            self._parts = [data] if data else []


class LineLog:
    """A growing file of JSON lines."""

    def __init__(
        self, store: Store, path: str, clock: Callable[[], float] = time.monotonic, warn: Warn = warn_on_stderr
    ) -> None:
        kept = b"" if store.local_root is not None else b"".join(read_lines(store, path))
        self._file = GrowingFile(store, path, kept, clock, warn)

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
