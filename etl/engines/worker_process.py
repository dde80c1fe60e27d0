"""The processes behind `UnitRunner`s: started one by one, or forked from a process with all imports done.

Light: each Python worker of Spark's imports it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import etl
from shardmill.jobs.process import SAFE_PATH, python_path

FORK, END = b"fork", b"end "
"""Requests to a fork server: start a worker on the two descriptors sent along, or end one (END PID)."""
# The working directory is in none of the paths; ours come last, behind the interpreter's own.
# Imports make no garbage, and to look for it among what they made takes a sixth of their time: `unit_worker` begins to.
_BOOTSTRAP = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[1]); from etl.engines.unit_worker import {main}; {main}()"
)
_MAX_ANSWER_BYTES = 32
_LIBRARIES = {
    "OMP_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": f"{16 << 20}",
    "MALLOC_TRIM_THRESHOLD_": f"{64 << 20}",
    "MALLOC_TOP_PAD_": f"{4 << 20}",
}
"""Settings for OpenBLAS, Arrow, and glibc, whose allocator they then share."""


class WorkerProcess:
    """A process that runs `etl.engines.unit_worker` until its requests end."""

    def __init__(self, requests: int, answers: int, end: Callable[[], int]) -> None:
        """`end` kills it, if it has not ended, and returns its exit status."""
        self.requests: IO[bytes] = os.fdopen(requests, "wb")
        # Unbuffered: whoever waits for what becomes readable must not find it read already.
        self.answers: IO[bytes] = os.fdopen(answers, "rb", buffering=0)
        self._end = end

    def end(self) -> int:
        """End it now, if it has not ended; returns its exit status."""
        status = self._end()
        # Closing flushes what it ended too early to read.
        with suppress(BrokenPipeError):
            self.requests.close()
        self.answers.close()
        return status


StartWorker = Callable[[], WorkerProcess]


def start_worker() -> WorkerProcess:
    """A worker that this process starts by itself."""
    with ExitStack() as theirs:
        (requests, answers), (their_requests, their_answers) = _pipes(theirs)
        process = _popen("main", their_requests, their_answers)
    return WorkerProcess(requests, answers, lambda: _killed(process))


class ForkServer:
    """A process that imports what workers need, and forks them: a worker begins at once, and pages are shared.

    Making one does not wait for its imports. It ends with this process, and all of its workers with it.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = _popen("serve", theirs.fileno())

    def start_worker(self) -> WorkerProcess:
        """A forked worker. If the server is lost, to an out-of-memory killer say, one that imports by itself."""
        with ExitStack() as theirs:
            (requests, answers), both = _pipes(theirs)
            try:
                socket.send_fds(self._socket, [FORK], both)
                process_id = self._answer()
                return WorkerProcess(requests, answers, lambda: self._end_worker(process_id))
            except OSError:
                os.close(requests)
                os.close(answers)
        return start_worker()

    def _end_worker(self, process_id: int) -> int:
        try:
            self._socket.send(END + str(process_id).encode())
            return self._answer()
        except OSError:
            return -signal.SIGKILL  # workers do not outlive the server

    def close(self) -> None:
        """End the server, and with it all workers that are left."""
        self._socket.close()
        _killed(self._process)

    def _answer(self) -> int:
        answer = self._socket.recv(_MAX_ANSWER_BYTES)
        if not answer:
            raise ConnectionResetError("the fork server has ended")
        return int(answer)


def _pipes(theirs: ExitStack) -> tuple[tuple[int, int], tuple[int, int]]:
    """Our ends and theirs of a worker's pipes, in both the one for requests first; theirs go with the stack."""
    (their_requests, requests), (answers, their_answers) = os.pipe(), os.pipe()
    theirs.callback(os.close, their_requests)
    theirs.callback(os.close, their_answers)
    return (requests, answers), (their_requests, their_answers)


def _killed(process: subprocess.Popen[bytes]) -> int:
    process.kill()
    return process.wait()


def _popen(main: str, requests: int, answers: int | None = None) -> subprocess.Popen[bytes]:
    """A Python that runs a function of `etl.engines.unit_worker`, without threads of its libraries.

    They would compete with the other workers, and a process that forks must have none. Nor does it give memory back
    between two images, or two shards: the kernel would clear each page anew.
    """
    root = str(Path(etl.__file__).parent.parent.absolute())
    return subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP.format(main=main), root, str(os.getpid())],
        stdin=requests,
        stdout=answers,
        env={**os.environ, **SAFE_PATH, "PYTHONPATH": python_path(), **_LIBRARIES},
    )
