"""Processes that are forked from one that has imported what they need (fork_server.py): tests start hundreds of them.

`multiprocessing` has such a server too, but its children are no programs with an output.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Program:
    """A `module:function` to call, as a command with these arguments (the first is its name)."""

    function: str
    arguments: Sequence[str]
    directory: str
    environment: Mapping[str, str]


class ForkedProcess:
    """The part of a `subprocess.Popen` that its users need."""

    def __init__(self, modules: tuple[str, ...], program: Program, *, is_one_output: bool = False) -> None:
        """`modules` are what its server imports. `is_one_output`: stderr goes where stdout goes."""
        output, written = os.pipe()
        errors, also_written = (None, os.dup(written)) if is_one_output else os.pipe()
        end, told = os.pipe()
        request = json.dumps(asdict(program)).encode()
        sys.audit("tests.fork", program.function)
        socket.send_fds(_server(modules)[0], [request], [written, also_written, told])
        for each in (written, also_written, told):
            os.close(each)
        # Open as long as the process runs.
        self.stdout = open(output, "rb")  # noqa: SIM115
        self.stderr = None if errors is None else open(errors, "rb")  # noqa: SIM115
        self._end = open(end)  # noqa: SIM115
        self.pid = int(self._end.readline())
        self.returncode: int | None = None
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()

    def _wait(self) -> None:
        with self._end:
            self.returncode = int(self._end.readline())

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._waiting.join()
        assert self.returncode is not None
        return self.returncode


def parent_of_forks(modules: tuple[str, ...]) -> int:
    """The process id of the server."""
    return _server(modules)[1]


@functools.cache
def _server(modules: tuple[str, ...]) -> tuple[socket.socket, int]:
    """It ends with this process, whose end of the connection is the only one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.quick_start.fork_server", str(its.fileno()), *modules]
    server = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}, pass_fds=[its.fileno()],
        start_new_session=True,
    )  # fmt: skip
    its.close()
    return ours, server.pid


def run_forked(modules: tuple[str, ...], program: Program, timeout: float) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with captured text. Raises TimeoutExpired, and kills the process and its group, as that."""
    process = ForkedProcess(modules, program)
    assert process.stderr is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout, expire)
    timer.start()
    with process.stderr as stderr, process.stdout as stdout:
        said: list[bytes] = []
        reading = threading.Thread(target=lambda: said.append(stderr.read()))
        reading.start()
        printed = stdout.read()
        reading.join()
    returncode = process.wait()
    timer.cancel()
    if expired.is_set():
        raise subprocess.TimeoutExpired(list(program.arguments), timeout, printed, said[0])
    return subprocess.CompletedProcess(list(program.arguments), returncode, printed.decode(), said[0].decode())
