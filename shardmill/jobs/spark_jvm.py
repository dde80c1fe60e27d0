"""The JVM behind a Spark session: it gets its settings in a private file, and its words go to the run's log.

PySpark alone would put every setting on the JVM's command line, where all users of the machine can read it, and would
let Spark's own lines run through the progress bar.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.errors import ShardmillError
from shardmill.jobs.redact import SPARK_REDACTION
from shardmill.storage import Store, as_storage_error, join_uri

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway

# What Spark itself hides on its pages, in its logs and in its event log; Spark's own defaults miss keys, DSNs and SAS.
REDACTION = {
    "spark.redaction.regex": SPARK_REDACTION,
    "spark.sql.redaction.options.regex": rf"(?i:url)|{SPARK_REDACTION}",
}


class SparkLog:
    """Where the JVM of this process writes; on a store that has no append, it is copied there at the end."""

    def __init__(self, store: Store, path: str) -> None:
        self.uri = join_uri(store.uri, path)
        self._store, self._path = store, path
        self._is_local = store.local_root is not None
        self._file = None if store.local_root is None else store.local_root / path

    def open(self) -> Any:
        """The file to append to."""
        if self._file is None:
            descriptor, name = tempfile.mkstemp(prefix="shardmill-spark-", suffix=".log")
            os.close(descriptor)
            self._file = Path(name)
        with as_storage_error(self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return open(self._file, "ab", buffering=0)

    def close(self) -> None:
        """Nothing more is expected; whatever the JVM still writes when it ends is not worth waiting for."""
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
    """A JVM that is started inside writes its output to this file; without it, to this process's own."""
    log = SparkLog(store, path)
    token = _log.set(log)
    try:
        yield
    finally:
        _log.reset(token)
        log.close()


def where_spark_says_more() -> str:
    """For a hint: the file that holds Spark's own words, if there is one."""
    log = _log.get()
    return f"Spark's own report is in {log.uri}" if log is not None else ""


def start_jvm(settings: Mapping[str, str]) -> JavaGateway:
    """Start Spark's JVM; its settings are in no command line, and in no file once it runs."""
    from pyspark.java_gateway import launch_gateway

    log = _log.get()
    output = log.open() if log is not None else None
    before = os.environ.get("PYSPARK_SUBMIT_ARGS")
    with properties_file(settings) as file:
        os.environ["PYSPARK_SUBMIT_ARGS"] = (
            f"--properties-file {file} --load-spark-defaults {before or 'pyspark-shell'}"
        )
        try:
            return launch_gateway(popen_kwargs={"stdout": output, "stderr": output})
        finally:
            _restore("PYSPARK_SUBMIT_ARGS", before)
            if output is not None:
                output.close()


def _restore(name: str, value: str | None) -> None:
    if value is None:
        del os.environ[name]
    else:
        os.environ[name] = value


@contextmanager
def properties_file(settings: Mapping[str, str]) -> Iterator[str]:
    """The path of a file for `spark-submit --properties-file`: its owner alone can read it, and it is removed after."""
    descriptor, path = tempfile.mkstemp(prefix="shardmill-", suffix=".properties")
    try:
        # mkstemp makes it 0600, whatever the umask is.
        with open(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{_escaped(name)}={_escaped(value)}\n" for name, value in settings.items())
        yield path
    finally:
        os.unlink(path)


def _escaped(text: str) -> str:
    # As java.util.Properties reads it: no separator, comment, line end or outer blank is taken for what it is not.
    ends = {"\n": "n", "\r": "r", "\f": "f"}
    return re.sub(r"[\\\s=:#!]", lambda found: "\\" + ends.get(found[0], found[0]), text)
