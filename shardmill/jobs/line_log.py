"""Appends lines to files in any store: `events.jsonl`, `steps.jsonl` and the scalars of a run; and `spark.log`, the
output of Spark's JVM, without importing Spark.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from shardmill.checksummed import check_relative_path
from shardmill.errors import NoSuchRoot, ShardmillError, StorageError
from shardmill.jobs.redact import warn_on_stderr
from shardmill.storage import Store, join_uri
from shardmill.storage_errors import as_storage_error

REWRITE_SHARE = 0.05
_PARTS = ".parts"

Warn = Callable[[str], None]


def pause_seconds(seconds: float) -> float:
    """Return how long to pause after a store call of so many seconds, which delayed the logged work."""
    return max(1.0, seconds / REWRITE_SHARE)


class Outage:
    """Tracks a store that fails: one warning until a call succeeds again, and pauses between calls."""

    def __init__(self, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        self._warn = warn
        self._clock = clock
        self._is_reported = False
        self._next_call = 0.0

    def may_call(self) -> bool:
        """Whether the last call succeeded, or was long enough ago."""
        return not self._is_reported or self._clock() >= self._next_call

    @contextmanager
    def reported(self, if_refused: str) -> Iterator[None]:
        """Around a call: a StorageError is a warning that begins with `if_refused`."""
        started = self._clock()
        try:
            yield
            self._is_reported = False
        except StorageError as error:
            if not self._is_reported:
                self._warn(f"{if_refused}: {error.what}")
            self._is_reported = True
            ended = self._clock()
            self._next_call = ended + pause_seconds(ended - started)

    def forget(self) -> None:
        """Report the next refusal, even if an earlier one was reported."""
        self._is_reported = False


class GrowingFile:
    """A file that grows. Local: what was appended is there at once. Elsewhere: the object is rewritten now and then.
    `flush` puts what it lacks then beside it, as `<path>.parts/<its place in the file>`.

    A store has no append; rewriting costs time that grows with the file, so its rate is held to a share of it. It
    covers the parts so far, which are deleted then.

    A store that refuses it (a full disk, an outage) does not end what is logged: `warn` is called once, and missing
    lines are retried with later appends and at the end.
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
        self._next_rewrite = 0.0
        self._outage = Outage(warn, clock)
        self._file: IO[bytes] | None = None
        self._parts = [kept]
        """The whole object; of a local file what is not written yet."""
        self._unsaved: list[bytes] = []
        """The end of it that is neither in the object nor in a part."""
        self._saved_bytes = len(kept)
        if store.local_root is not None:
            self._file = open_to_append(store.local_root / path)
            self._parts = []

    def append(self, data: bytes) -> None:
        """Add bytes at the end; a local reader sees all of them or none."""
        self._parts.append(data)
        if self._file is None:
            self._unsaved.append(data)
        if self._file is not None or self._clock() >= self._next_rewrite:
            self._write(f"{self._path} cannot be written; it will be retried")

    def flush(self) -> None:
        """Store all appended lines durably, unless the store fails."""
        if self._file is None and self._unsaved and self._outage.may_call():
            data = b"".join(self._unsaved)
            with self._outage.reported(f"{self._path} cannot be written; it will be retried"):
                self._store.put(f"{self._path}{_PARTS}/{self._saved_bytes:015d}", data)
                self._saved_bytes += len(data)
                self._unsaved = []

    def close(self) -> None:
        """Nothing is left to write after this."""
        if any(self._parts):
            self._outage.forget()
            self._write(f"{self._path} misses its last lines")
        if self._file is not None:
            self._file.close()

    def _write(self, if_refused: str) -> None:
        started = self._clock()
        with self._outage.reported(if_refused):
            if self._file is not None:
                self._add_to(self._file)
            else:
                self._parts = [b"".join(self._parts)]
                _rewrite(self._store, self._path, self._parts[0])
                self._saved_bytes, self._unsaved = len(self._parts[0]), []
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
        self._file = open_lines(store, path, clock, warn)

    def append(self, value: Mapping[str, Any]) -> None:
        """Add one line."""
        self._file.append(json.dumps(value).encode() + b"\n")

    def flush(self) -> None:
        """All lines so far outlive this process, unless the store refuses them."""
        self._file.flush()

    def close(self) -> None:
        """Nothing is left to write after this."""
        self._file.close()


def open_lines(
    store: Store, path: str, clock: Callable[[], float] = time.monotonic, warn: Warn = warn_on_stderr
) -> GrowingFile:
    """A growing file of whole lines, behind those that it holds already. Raises StorageError."""
    kept = b"" if store.local_root is not None else b"".join(read_lines(store, path))
    return GrowingFile(store, path, kept, clock, warn)


def open_to_append(target: Path) -> IO[bytes]:
    """A growing local file, made with its folder if need be. Raises StorageError if it cannot be."""
    with as_storage_error(target):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:
            # As in /proc, which is a folder and takes no others.
            raise OSError(errno.ENOTSUP, "no folder can be created there") from error
        # Unbuffered and in append mode: a line is whole for every reader, whatever then happens to this process.
        return open(target, "ab", buffering=0)


def read_lines(store: Store, path: str) -> list[bytes]:
    """The whole lines of a line log, each with its end; a last line that a kill cut short is left out."""
    # Listed before the object is read: of parts that go meanwhile, the object holds the bytes.
    parts = _parts_of(store, path)
    try:
        data = store.read(path)
    except FileNotFoundError:
        data = b""
    end, pieces = len(data), [data]
    for start, part in sorted(parts.items()):
        if start >= end:
            with suppress(FileNotFoundError):
                pieces.append(store.read(part))
                end = start + len(pieces[-1])
    return [line for line in b"".join(pieces).splitlines(keepends=True) if line.endswith(b"\n")]


def replace_lines(store: Store, path: str, lines: list[bytes]) -> None:
    """The log holds these lines and no others."""
    _rewrite(store, path, b"".join(lines))


def _rewrite(store: Store, path: str, data: bytes) -> None:
    parts = _parts_of(store, path)
    store.put(path, data)
    for part in parts.values():
        store.delete(part)


def _parts_of(store: Store, path: str) -> dict[int, str]:
    """Place in the file -> path; none on a local disk, where a file is appended to."""
    if store.local_root is not None:
        return {}
    try:
        return {int(file.path.rpartition("/")[2]): file.path for file in store.list(f"{path}{_PARTS}")}
    except NoSuchRoot:
        return {}


class SparkLog:
    """The output of this process's JVM; a store that has no append gets a copy at the end."""

    def __init__(self, store: Store, path: str) -> None:
        self.uri = join_uri(store.uri, path)
        self._store, self._path = store, path
        self._is_local = store.local_root is not None
        self._file = None if store.local_root is None else store.local_root / path

    def open(self) -> IO[bytes]:
        """The file to append to."""
        if self._file is None:
            descriptor, name = tempfile.mkstemp(prefix="shardmill-spark-", suffix=".log")
            os.close(descriptor)
            self._file = Path(name)
        return open_to_append(self._file)

    def close(self) -> None:
        """Copy the file if need be; what the JVM still writes when it ends is not worth waiting for."""
        if not self._is_local and self._file is not None:
            try:
                self._store.put(self._path, self._file.read_bytes())
            except ShardmillError as error:  # the run's own outcome counts more than its log
                sys.stderr.write(f"WARNING: Spark's log stays in {self._file}: {error.what}\n")
            else:
                self._file.unlink()


_log: ContextVar[SparkLog | None] = ContextVar("spark_log", default=None)


@contextmanager
def spark_log(store: Store, path: str) -> Iterator[None]:
    """A JVM that is started inside writes its output to this file; without it, to this process's own stderr."""
    log = SparkLog(store, path)
    token = _log.set(log)
    try:
        yield
    finally:
        _log.reset(token)
        log.close()


def open_spark_log() -> IO[bytes] | None:
    """The file that a JVM started now appends its output to, or None for this process's own stdout and stderr."""
    log = _log.get()
    return None if log is None else log.open()


def spark_log_hint() -> str:
    """Return a hint for errors: the file with the JVM's output, or "" if it goes to this process's own output."""
    log = _log.get()
    return f"Spark's own report is in {log.uri}" if log is not None else ""
