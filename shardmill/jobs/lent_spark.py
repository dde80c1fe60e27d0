"""A Spark session that one process lends to a command which it has started: the command sends tasks, the other process
runs them and sends rows. So a notebook's session does the work of `shardmill.run`, which stays in a process of its own
(shardmill/calls/process.py); of our applications the notebook imports nothing.

They talk by messages of `shardmill.child_process` over a socket. The lender begins with its settings. Then the command
sends jobs, one at a time, and whether to cancel one; the lender answers with the tasks that are done, and at last with
the rows, or with what Spark said.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cache
from typing import Any

from shardmill.applications import OnExecutor
from shardmill.child_process import pack_message, read_message
from shardmill.errors import UsageError
from shardmill.jobs.spark_tasks import ContextTasks, Job, Row, SparkTasks, Tasks

_VARIABLE = "SHARDMILL_LENT_SPARK"
"""It tells the command the lender's process, and which descriptor the socket is; to all others it means nothing."""
_POLL_SECONDS = 0.2


class SparkJobFailed(Exception):
    """What Spark said of a job of the lender; the text may hold Java's stack."""


class _Line:
    """One end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file: Any = end.makefile("rb", buffering=0)

    def send(self, header: dict[str, Any], body: bytes = b"") -> None:
        for part in pack_message(header, body):
            self._end.sendall(part)

    def close(self) -> None:
        """Also for who waits at the other end."""
        self._file.close()
        self._end.close()

    def poll(self, seconds: float | None) -> bool:
        return bool(select.select([self._end], [], [], seconds)[0])

    def receive(self) -> tuple[dict[str, Any], bytes]:
        message = read_message(self._file)
        if message is None:
            raise EOFError("the other process has ended")
        return message


class LentSpark:
    """The lender's side, for one command."""

    def __init__(self, session: Any) -> None:
        """Raises UsageError if it is no session, or one that has ended."""
        self.tasks = _tasks_of_session(session)
        ours, self._theirs = socket.socketpair()
        self._line, self.descriptor = _Line(ours), self._theirs.fileno()
        self.environment = {_VARIABLE: f"{os.getpid()} {self.descriptor}"}

    def serve(self) -> None:
        """Begin, once the command has its end. It ends with the command; the session stays."""
        self._theirs.close()
        threading.Thread(target=self._serve, name="shardmill-lent-spark", daemon=True).start()

    def _serve(self) -> None:
        with closing(self._line), suppress(EOFError, OSError):
            self._line.send({"settings": dict(self.tasks.settings), "own_address": self.tasks.own_address})
            while True:
                header, body = self._line.receive()
                if "work" in header:
                    self._run(header["job"], _unpacked(header, body))
                elif "asks_slots" in header:
                    self._line.send(_answer("slots", self.tasks.num_slots))

    def _run(self, number: int, tasks: Tasks) -> None:
        job = self.tasks.start(tasks)
        try:
            while not job.wait(_POLL_SECONDS):
                self._line.send({"job": number, "done": job.num_done()})
                # While a job is at work, only its end is asked for.
                if self._line.poll(0):
                    self._line.receive()
                    job.cancel()
        except (EOFError, OSError):  # the command has ended
            job.cancel()
            raise
        self._line.send({"job": number, **_answer("rows", job.result)})


def _answer(name: str, ask: Callable[[], object]) -> dict[str, Any]:
    try:
        return {name: ask()}
    except Exception as error:  # the command says what it means
        return {"failure": str(error)}


def _tasks_of_session(session: Any) -> SparkTasks:
    kinds = {f"{each.__module__}.{each.__qualname__}" for each in type(session).__mro__}
    if "pyspark.sql.connect.session.SparkSession" in kinds and not session.is_stopped:
        from shardmill.jobs.spark_connect import ConnectTasks

        return ConnectTasks(session)
    if "pyspark.sql.session.SparkSession" in kinds and session.sparkContext._jsc is not None:
        return ContextTasks(session.sparkContext)
    raise UsageError(
        f"spark = {session!r}",
        "expected a SparkSession that has not been stopped, of a cluster or of Spark Connect",
        "pass the notebook's `spark`, or leave it out: then the command starts Spark by the config's section spark",
    )


@cache
def lent_tasks() -> SparkTasks | None:
    """Those of the process that has started this one with its session, if it has."""
    lender, _, descriptor = os.environ.get(_VARIABLE, "").partition(" ")
    is_ours = lender == str(os.getppid())
    return _LentTasks(_Line(socket.socket(fileno=int(descriptor)))) if is_ours else None


class _LentTasks(SparkTasks):
    """The command's side."""

    def __init__(self, line: _Line) -> None:
        super().__init__(**line.receive()[0])
        self._line, self._numbers = line, itertools.count()

    def num_slots(self) -> int | None:
        self._line.send({"asks_slots": True})
        while "job" in (header := self._line.receive()[0]):
            pass  # of one that was cancelled
        return _value(header, "slots")

    def start(self, tasks: Tasks) -> Job:
        number = next(self._numbers)
        header, body = _packed(tasks)
        self._line.send({"job": number, **header}, body)
        return _LentJob(self._line, number)


class _LentJob:
    def __init__(self, line: _Line, number: int) -> None:
        self._line, self._number = line, number
        self._last: dict[str, Any] = {"done": 0}

    def num_done(self) -> int:
        return self._last.get("done", 0)

    def cancel(self) -> None:
        self._line.send({"job": self._number, "cancel": True})

    def wait(self, seconds: float | None) -> bool:
        if "done" in self._last and self._line.poll(seconds):
            header, _ = self._line.receive()
            # The others are of a job that was cancelled.
            if header.get("job") == self._number:
                self._last = header
        return "done" not in self._last

    def result(self) -> Sequence[Row]:
        while not self.wait(None):
            pass
        return [tuple(row) for row in _value(self._last, "rows")]


def _value(answer: dict[str, Any], name: str) -> Any:
    if "failure" in answer:
        raise SparkJobFailed(answer["failure"])
    return answer[name]


def _packed(tasks: Tasks) -> tuple[dict[str, Any], bytes]:
    """As a message; the functions are the bytes that Spark ships."""
    fold = [] if tasks.fold is None else [tasks.fold.shipped]
    parts = [tasks.work.shipped, *fold, *(tasks.payloads or ())]
    header = {
        "work": len(parts[0]), "fold": len(fold[0]) if fold else None,
        "payloads": None if tasks.payloads is None else [len(each) for each in tasks.payloads],
        "columns": dict(tasks.columns), "folded": dict(tasks.folded), "num_tasks": tasks.num_tasks,
        "num_parts": tasks.num_parts, "are_together": tasks.are_together,
    }  # fmt: skip
    return header, b"".join(parts)


def _unpacked(header: dict[str, Any], body: bytes) -> Tasks:
    header = {name: value for name, value in header.items() if name != "job"}
    sizes = [header["work"], header["fold"] or 0, *(header["payloads"] or ())]
    work, fold, *payloads = (
        body[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)
    )
    functions = {"work": OnExecutor.of_shipped(work), "fold": OnExecutor.of_shipped(fold) if fold else None}
    return Tasks(**{**header, **functions, "payloads": None if header["payloads"] is None else payloads})
