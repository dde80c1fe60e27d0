"""A run's `spark.log`: the output of Spark's JVM, kept with the run's record; does not import Spark."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from shardmill.errors import ShardmillError
from shardmill.jobs.line_log import open_to_append
from shardmill.storage import Store, join_uri


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
