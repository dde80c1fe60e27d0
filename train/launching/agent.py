"""Starts the process of one rank, forwards its output, reports its exit, and kills it on abort."""

from __future__ import annotations

import io
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from shardmill.child_process import kill_session, start_python
from shardmill.environments.place import Place
from shardmill.errors import ShardmillError
from shardmill.jobs.process import SAFE_PATH, Scratch
from train.contracts.task import WorkerTask
from train.contracts.values import from_json
from train.launching.connection import ADDRESS_VARIABLE, TOKEN_VARIABLE, Connection, call_driver
from train.launching.devices import device_environment
from train.launching.faults import failure_of
from train.launching.messages import Abort, Output, RankExit
from train.launching.output import RankOutput

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


def keep_rank(place: Place, environment: dict[str, str], assigned: Sequence[str] | None = None) -> int:
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
