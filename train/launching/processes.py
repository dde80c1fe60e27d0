"""The processes of ranks: started here (the launcher `local`) or for a driver elsewhere, and killed on abort.

What they print is forwarded line by line, and its end is kept for errors.

A rank in the command's own process is read by `sys.stdout` and `sys.stderr`, and not by their descriptors: a pipe in
front of these would take the terminal from a debugger, and native code that fills it while it holds the interpreter's
lock would wait for a reader that never runs. It goes on to stderr: stdout belongs to the command's result (`--json`).
"""

from __future__ import annotations

import collections
import io
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from typing import Any, TextIO

from shardmill.child_process import kill_session, start_python
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import ShardmillError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.jobs.process import SAFE_PATH, Scratch, python_path
from train.api import Launcher
from train.contracts.task import WorkerTask
from train.contracts.values import OUTPUT, TrainResult, from_json
from train.contracts.world import LOOPBACK
from train.launching.connection import ADDRESS_VARIABLE, TOKEN_VARIABLE, Connection, call_driver
from train.launching.devices import device_environment
from train.launching.messages import Abort, Output, RankExit
from train.launching.rank import DEFAULT_WORKER
from train.launching.rank_failures import failure_of
from train.launching.watchdog import Watchdog
from train.reporting.observer import GlobalStep, TrainObserver
from train.strategies import roles_of


def launch_local(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run every rank as a process here. Raises the first failing rank's own error."""
    world_size = len(roles_of(task.config))
    with Watchdog(task, worker, observer, LOOPBACK) as watchdog:
        shared = {**os.environ, "PYTHONPATH": python_path(), **watchdog.environment()}
        places = [
            RankEnvironment(rank, world_size, local_rank=rank, ranks_per_node=world_size) for rank in range(world_size)
        ]
        own = [place.environment() | device_environment(place, task.config) for place in places]
        environments = {rank: shared | each for rank, each in enumerate(own)}
        with rank_processes(environments, watchdog.report_output, watchdog.report_exit):
            return watchdog.watch()


LOCAL = Launcher(launch_local, ranks_here=lambda world_size, spark: world_size, outlives_ranks=True)


# After the process has ended its output is read for at most this long: a child of it may hold the pipe open forever.
OUTPUT_SECONDS = 1.0
EXIT_NOT_STARTED = 2
# Ranks end by themselves when they have finished; native libraries may take this long to shut down.
EXIT_SECONDS = 5.0


class RankProcess:
    """A running `python -m train.launching.rank`, in a session of its own: Ctrl-C at the terminal does not reach it.

    It also has its own temporary folder: a rank always ends without the clean-up of Python and TensorFlow.
    """

    def __init__(self, environment: dict[str, str], emit: Callable[[str], None]) -> None:
        """`emit`: as in `RankOutput`, called in a thread of its own."""
        self._scratch = Scratch()
        self._process = start_python(
            ["-m", "train.launching.rank"],
            {"TF_CPP_MIN_LOG_LEVEL": "2", **environment, **SAFE_PATH, "TMPDIR": str(self._scratch.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            own_session=True,
        )
        assert isinstance(self._process.stdout, io.BufferedReader)
        self._output = RankOutput(self._process.stdout, emit)
        self._reader = threading.Thread(target=self._output.read, name="rank-output", daemon=True)
        self._reader.start()

    def wait(self) -> RankExit:
        """Return when the process has ended."""
        returncode = self._process.wait()
        self._reader.join(OUTPUT_SECONDS)
        self._scratch.remove()
        return RankExit(returncode, self._output.tail())

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it and its children by SIGKILL, which ends stopped processes too."""
        kill_session(self._process)


@contextmanager
def rank_processes(
    environments: Mapping[int, dict[str, str]],
    report_output: Callable[[int, str], None],
    report_exit: Callable[[int, RankExit], None],
) -> Iterator[None]:
    """The processes of some ranks, by number: started on entry; none is left on exit in any case.

    What each prints and how it ends is reported with the rank's number, from threads.
    """
    processes: list[RankProcess] = []

    def wait_for(rank: int, process: RankProcess) -> None:
        report_exit(rank, process.wait())

    try:
        for rank, environment in environments.items():
            processes.append(RankProcess(environment, partial(report_output, rank)))
            threading.Thread(target=wait_for, args=(rank, processes[-1]), name="rank-exit", daemon=True).start()
        yield
        deadline_seconds = time.monotonic() + EXIT_SECONDS
        while any(process.is_running() for process in processes) and time.monotonic() < deadline_seconds:
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def keep_rank(place: RankEnvironment, environment: dict[str, str], assigned: Sequence[str] | None = None) -> int:
    """Run one rank and report its exit to the driver, for launchers whose processes start elsewhere. -> its exit code.

    `environment` holds the driver's address and token; `assigned`: see `devices_of_rank`.
    """
    address, token = environment[ADDRESS_VARIABLE], environment[TOKEN_VARIABLE]
    connection, welcome = call_driver(address, token, "agent", place.rank, os.getpid())
    try:
        own = place.environment() | device_environment(place, from_json(WorkerTask, welcome.task_json).config, assigned)
    except ShardmillError as error:
        # What is known of this host only here ends the job as the same error of a rank would.
        connection.send(failure_of(error))
        _wait_for_abort(connection)
        return EXIT_NOT_STARTED
    process = RankProcess(environment | own, partial(_send_output, connection))
    threading.Thread(target=_end_on_abort, args=(connection, process), name="agent-abort", daemon=True).start()
    note = process.wait()
    # A rank that is gone may have left children in its session.
    process.kill()
    try:
        connection.send(note)
    except OSError:
        pass
    return note.returncode


def _send_output(connection: Connection, text: str) -> None:
    # A driver that is gone reads nothing more; the rank notices it by itself.
    with suppress(OSError):
        connection.send(Output(text))


def _end_on_abort(connection: Connection, process: RankProcess) -> None:
    _wait_for_abort(connection)
    process.kill()


def _wait_for_abort(connection: Connection) -> None:
    """Return when the driver asks this process to end, or is gone."""
    while (message := connection.receive()) is not None:
        if isinstance(message, Abort):
            return


MAX_TOLD_BYTES = 4 << 20
"""Limit for one process, so that a model that prints its weights cannot fill the driver's memory or disk."""
MAX_LINE_BYTES = 2000
NUM_TAIL_LINES = 40
_READ_BYTES = 1 << 16


class OutputLines:
    """The output of one process, cut into lines."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        """`emit` is given one or more whole lines at a time; of a long one the end, of too many the first."""
        self._emit = emit
        self._num_left = MAX_TOLD_BYTES
        self._unfinished = b""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=NUM_TAIL_LINES)

    def add(self, data: bytes) -> None:
        """Add the next output. User code may print anything, including text without line ends."""
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = unfinished[-MAX_LINE_BYTES:]
        self._take(lines)

    def end(self) -> None:
        """End the output."""
        if self._unfinished:
            self._take([self._unfinished])
            self._unfinished = b""

    def tail(self) -> str:
        """The last lines so far."""
        return b"\n".join(self._tail).decode(errors="replace").strip()

    def _take(self, lines: list[bytes]) -> None:
        lines = [line[-MAX_LINE_BYTES:] for line in lines]
        self._tail += lines
        text = b"".join(line + b"\n" for line in lines)
        if not text or self._num_left <= 0:
            return
        self._num_left -= len(text)
        if self._num_left <= 0:
            end = text.rfind(b"\n", 0, len(text) + self._num_left) + 1
            text = text[:end] + f"(more than {MAX_TOLD_BYTES:,} bytes; truncated)\n".encode()
        self._emit(text.decode(errors="replace"))


class RankOutput:
    """The output of one process's pipe, read until it ends."""

    def __init__(self, pipe: io.BufferedReader, emit: Callable[[str], None]) -> None:
        """`emit`: as that of `OutputLines`."""
        self._pipe = pipe
        self._lines = OutputLines(emit)

    def read(self) -> None:
        """Return when nothing is left that holds the other end open."""
        while data := self._pipe.read1(_READ_BYTES):
            self._lines.add(data)
        self._lines.end()

    def tail(self) -> str:
        """The last lines so far."""
        return self._lines.tail()


class TeedStream:
    """`stream`, of which `output` keeps what is written to it; what the driver writes goes to a stream of its own."""

    def __init__(self, stream: TextIO, output: InlineOutput, of_driver: TextIO) -> None:
        self._stream = stream
        self._output = output
        self._of_driver = of_driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._output.driver_speaks:
            return self._of_driver.write(text)
        num_written = self._stream.write(text)
        self._output.record(text)
        return num_written

    def flush(self) -> None:
        self._stream.flush()
        self._of_driver.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class InlineOutput:
    """Keeps what is printed until the thread that trains next calls the observer, and tells it first.

    So nobody who prints waits for a store, gets its errors, or calls the observer from a thread of theirs.
    """

    def __init__(self, observer: TrainObserver) -> None:
        self._observer = observer
        self._lines = OutputLines(lambda text: observer.event(OUTPUT, {"rank": 0, "text": text}))
        self._printed: deque[str] = deque()
        self._num_waiting = 0
        self._is_over = False
        self._trains = threading.current_thread()
        # The driver prints in this process too, and is no rank.
        self._driver = threading.local()

    @property
    def driver_speaks(self) -> bool:
        """Whether this thread is inside the observer."""
        return getattr(self._driver, "speaks", False)

    def record(self, text: str) -> None:
        """Record output from any thread."""
        # Between two steps no more is kept than all of them together may print.
        if self._is_over or self._num_waiting > MAX_TOLD_BYTES:
            return
        self._num_waiting += len(text)
        self._printed.append(text)

    def step(self, step: GlobalStep) -> None:
        """Forward a step to the observer."""
        with self._for_driver():
            self._observer.step(step)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Forward an event to the observer."""
        with self._for_driver():
            self._observer.event(name, fields)

    def end(self) -> None:
        """The training is over; streams that somebody has kept are not printed any more."""
        with self._for_driver():
            self._lines.end()
        self._is_over = True

    @contextmanager
    def _for_driver(self) -> Iterator[None]:
        self._driver.speaks = True
        try:
            if threading.current_thread() is self._trains:
                printed = [self._printed.popleft() for _ in range(len(self._printed))]
                self._lines.add("".join(printed).encode(errors="replace"))
            yield
        finally:
            self._driver.speaks = False


@contextmanager
def gathered(observer: TrainObserver) -> Iterator[TrainObserver]:
    """An observer to train with, who tells what is printed inside.

    In the main thread alone, as streams are the process's; and where there are streams.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or sys.stdout is None or sys.stderr is None:
        yield observer
        return
    output = InlineOutput(observer)
    out: Any = TeedStream(sys.stderr, output, of_driver=sys.stdout)
    err: Any = TeedStream(sys.stderr, output, of_driver=sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield output
    finally:
        output.end()
