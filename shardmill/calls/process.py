"""Runs a command of the command line in a process of its own, for a caller in Python.

Not in the caller's process: there our applications would take the names of a user's own `train.py`
(docs/decisions/0012-import-names.md), and a framework would keep the memory of the GPU until the notebook ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, NoReturn, Protocol

from shardmill.child_process import kill_session
from shardmill.errors import ShardmillError, TrainingError, UsageError, error_class
from shardmill.jobs.observer import AS_DRAWN, AS_JSON, VARIABLE
from shardmill.jobs.process import python_path
from shardmill.registry import applications_home, find_below

if TYPE_CHECKING:
    from shardmill.jobs.lent_spark import LentSpark

# It has a session of its own, so that Ctrl-C comes once, from here; and it ends with this process all the same.
_MAIN = (
    "from shardmill.jobs.process import end_with_parent; end_with_parent(); "
    "from shardmill.applications import main; main()"
)
_POLL_MILLISECONDS = 200
_INTERRUPTED = 130


class Watcher(Protocol):
    """Who shows what the command says."""

    @property
    def takes_lines(self) -> bool:
        """False: the command writes to this process's stderr itself, where it draws bars on a terminal."""
        ...

    @property
    def unseen(self) -> Sequence[str]:
        """The last lines that were not shown."""
        ...

    def line(self, line: str) -> None: ...

    def end(self, *, has_failed: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the arguments behind it."""

    name: str
    arguments: Sequence[str]
    spark: LentSpark | None = None
    """The caller's Spark, which does what the command has Spark do."""

    def run(self, watcher: Watcher) -> Any:
        """The document that the command prints with `--json`. One that has found what it looks for (a drift beyond a
        limit, say) says so in its document and by its exit code: that is a result.

        Raises the ShardmillError that the command ended with; its message is the command's line.
        """
        home = applications_home()
        if find_below(home, "pipeline.cli") is None:
            raise UsageError(
                f"shardmill.{self.name} needs the applications of shardmill",
                f"{home} holds the library alone",
                "`pip install shardmill` installs both",
            )
        with tempfile.TemporaryFile() as stdout:
            process = self._start(stdout, watcher)
            has_failed = True
            try:
                _follow(process, watcher)
                stdout.seek(0)
                document = _document(stdout.read())
                has_failed = _has_failed(process.returncode, document)
            finally:
                watcher.end(has_failed=has_failed)
        if has_failed:
            self._fail(process.returncode, document, watcher.unseen)
        return document

    def _start(self, stdout: IO[bytes], watcher: Watcher) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": python_path(),
            VARIABLE: AS_JSON if watcher.takes_lines else AS_DRAWN,
        }
        if self.spark is not None:
            # Of the JVM that started this process, if one has.
            environment.pop("PYSPARK_GATEWAY_PORT", None)
            environment |= self.spark.environment
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, self.name, "--json", *self.arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE if watcher.takes_lines else None,
            start_new_session=True,
            pass_fds=[] if self.spark is None else [self.spark.descriptor],
        )
        if self.spark is not None:
            self.spark.serve()
        return process

    def _fail(self, status: int, document: Any, unseen: Sequence[str]) -> NoReturn:
        failure = _error_of(document)
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if failure is None:
            how = signal.Signals(-status).name if status < 0 else f"exit code {status}"
            error: ShardmillError = TrainingError(
                f"the process of shardmill.{self.name} ended by {how} and did not say why",
                "expected a result or an error",
                "memory may have run out: `dmesg` of this machine says so; the same call resumes where it stopped",
            )
        else:
            kind = error_class(failure["kind"], failure["code"])
            error = kind(failure["message"], detail={**failure["detail"], "run_id": document["run_id"]})
        if isinstance(error, TrainingError) and unseen:
            # The end of a failed rank's output explains its error.
            error.add_note("\n".join(unseen))
        raise error


def _follow(process: subprocess.Popen[bytes], watcher: Watcher) -> None:
    """Show what the process says until it has ended."""

    def show() -> None:
        for line in _lines(process):
            watcher.line(line)
        process.wait()

    try:
        show()
    except BaseException as error:
        # As in a terminal, Ctrl-C (in Jupyter: the stop button) ends the command in order; a second one at once.
        process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
        try:
            show()
        except BaseException:
            kill_session(process)
            process.wait()
            raise
        raise
    finally:
        if process.stderr is not None:
            process.stderr.close()


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """The lines of its stderr, until it has ended: what it has started may hold the pipe for longer."""
    if process.stderr is None:
        return
    pipe, poll, pending = process.stderr.fileno(), select.poll(), b""
    poll.register(pipe, select.POLLIN)
    while True:
        if not poll.poll(_POLL_MILLISECONDS):
            if process.poll() is not None:
                break
        elif data := os.read(pipe, 65_536):
            *lines, pending = (pending + data).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)
        else:
            break
    if pending:
        yield pending.decode("utf-8", "replace")


def _document(stdout: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(stdout)
    return None


def _has_failed(status: int, document: Any) -> bool:
    if document is None or status < 0 or status == _INTERRUPTED:
        return True
    return status != 0 and _error_of(document) is not None


def _error_of(document: Any) -> dict[str, Any] | None:
    """Of the document of a failure; what a command has found has none."""
    error = document.get("error") if isinstance(document, dict) else None
    return error if isinstance(error, dict) else None
