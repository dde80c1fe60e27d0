"""The processes behind `UnitRunner`s: started one by one, or forked from a process with all imports done.

Light: each Python worker of Spark's imports it.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import etl
from shardmill.child_process import ChildProcess, calling, ended, pipes, start_child, start_python
from shardmill.jobs.process import SAFE_PATH, python_path

FORK, END = b"fork", b"end "
"""Requests to a fork server: start a worker on the two descriptors sent along, or end one (END PID SECONDS)."""
KILLED = b"killed"
"""Its answer instead of an exit status, if the worker did not end by itself within the seconds."""
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


StartWorker = Callable[[], ChildProcess]
"""Starts a process that runs `etl.engines.unit_worker` until its requests end."""


def start_worker() -> ChildProcess:
    """A worker that this process starts by itself."""
    return start_child(_main("main"), _environment())


class ForkServer:
    """A process that imports what workers need, and forks them: a worker begins at once, and pages are shared.

    Making one does not wait for its imports. It ends with this process, and all of its workers with it.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_python(_main("serve"), _environment(), stdin=theirs.fileno(), stdout=None)

    def start_worker(self) -> ChildProcess:
        """A forked worker. If the server is lost, to an out-of-memory killer say, one that imports by itself."""
        try:
            with pipes() as (ours, theirs):
                socket.send_fds(self._socket, [FORK], theirs)
                process_id = int(self._answer())
        except OSError:
            return start_worker()
        return ChildProcess(process_id, *ours, lambda seconds: self._end_worker(process_id, seconds))

    def _end_worker(self, process_id: int, seconds: float) -> int | None:
        try:
            self._socket.send(END + f"{process_id} {seconds}".encode())
            answer = self._answer()
            return None if answer == KILLED else int(answer)
        except OSError:
            return -signal.SIGKILL  # workers do not outlive the server

    def close(self) -> None:
        """End the server, and with it all workers that are left."""
        self._socket.close()
        ended(self._process, 0.0)

    def _answer(self) -> bytes:
        answer = self._socket.recv(_MAX_ANSWER_BYTES)
        if not answer:
            raise ConnectionResetError("the fork server has ended")
        return answer


def _main(function: str) -> tuple[str, ...]:
    """A function of `etl.engines.unit_worker`."""
    return calling(f"etl.engines.unit_worker:{function}", str(Path(etl.__file__).parent.parent.absolute()))


def _environment() -> dict[str, str]:
    """Without threads of libraries.

    They would compete with the other workers, and a process that forks must have none. Nor does it give memory back
    between two images, or two shards: the kernel would clear each page anew.
    """
    return {**os.environ, **SAFE_PATH, "PYTHONPATH": python_path(), **_LIBRARIES}
