"""Starts the process of one rank, keeps the end of its output, reports its exit, and kills it on abort."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardmill.errors import ShardmillError
from shardmill.jobs.process import SAFE_PATH, Scratch
from train.launching.devices import device_environment
from train.launching.faults import failure_of
from train.launching.place import Place
from train.launching.wire import ADDRESS_VARIABLE, TOKEN_VARIABLE, Abort, Connection, RankExit, call_driver
from train.task import WorkerTask
from train.values import from_json

NUM_OUTPUT_LINES = 40
# After the process has ended its output is read for at most this long: a child of it may hold the pipe open forever.
OUTPUT_SECONDS = 1.0
EXIT_NOT_STARTED = 2
# Ranks end by themselves when they have finished; native libraries may take this long to shut down.
EXIT_SECONDS = 5.0


class RankProcess:
    """A running `python -m train.launching.rank`, in a session of its own: Ctrl-C at the terminal does not reach it.

    It also has its own temporary folder: a rank always ends without the clean-up of Python and TensorFlow.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._scratch = Scratch()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train.launching.rank", str(os.getpid())],
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **environment, **SAFE_PATH, "TMPDIR": str(self._scratch.path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._lines: collections.deque[bytes] = collections.deque(maxlen=NUM_OUTPUT_LINES)
        self._reader = threading.Thread(target=self._read_output, name="rank-output", daemon=True)
        self._reader.start()

    def wait(self) -> RankExit:
        """Return when the process has ended."""
        returncode = self._process.wait()
        self._reader.join(OUTPUT_SECONDS)
        self._scratch.remove()
        return RankExit(returncode, b"".join(self._lines).decode(errors="replace").strip())

    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it and its children by SIGKILL, which ends stopped processes too."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # User code may print anything, without line ends too.
            self._lines.append(line[-2000:])


@contextmanager
def rank_processes(environments: list[dict[str, str]]) -> Iterator[list[RankProcess]]:
    """Started on entry; none is left on exit, however that comes."""
    processes: list[RankProcess] = []
    try:
        for environment in environments:
            processes.append(RankProcess(environment))
        yield processes
        deadline_seconds = time.monotonic() + EXIT_SECONDS
        while any(process.is_running() for process in processes) and time.monotonic() < deadline_seconds:
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def keep_rank(place: Place, environment: dict[str, str], assigned: Sequence[str] | None = None) -> int:
    """For launchers whose processes start elsewhere: run one rank and report its exit to the driver. -> its exit code.

    `environment` holds the driver's address and token; `assigned`: see `devices_of_rank`.
    """
    address, token = environment[ADDRESS_VARIABLE], environment[TOKEN_VARIABLE]
    connection, welcome = call_driver(address, token, "keeper", place.rank, os.getpid())
    try:
        own = place.environment() | device_environment(place, from_json(WorkerTask, welcome.task_json).config, assigned)
    except ShardmillError as error:
        # What is known of this host only here ends the job as the same error of a rank would.
        connection.send(failure_of(error))
        _wait_for_abort(connection)
        return EXIT_NOT_STARTED
    process = RankProcess(environment | own)
    threading.Thread(target=_end_on_abort, args=(connection, process), name="keeper-abort", daemon=True).start()
    note = process.wait()
    # A rank that is gone may have left children in its session.
    process.kill()
    try:
        connection.send(note)
    except OSError:
        pass
    return note.returncode


def _end_on_abort(connection: Connection, process: RankProcess) -> None:
    _wait_for_abort(connection)
    process.kill()


def _wait_for_abort(connection: Connection) -> None:
    """Return when the driver asks this process to end, or is gone."""
    while (message := connection.receive()) is not None:
        if isinstance(message, Abort):
            return
