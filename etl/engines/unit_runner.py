"""Runs work units in a separate process, for every engine: an image that ends the process does not end the engine.

The process is started by itself, or forked from one with all imports done. It decodes inside itself, which costs
nothing. If an image ends it, its unit is run again by a careful process, which decodes in a child of its own and so
finds out which image it was. Light, because each Python worker of Spark's imports it: tasks, units and results are JSON
here (`etl.units.units`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import etl
from shardmill import errors
from shardmill.child_process import ChildDied, ChildProcess, calling, ended, pipes, start_child, start_python
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.words import printable

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


class UnitRunner:
    """Runs the units of one task, one at a time, in a warm process that ends with this one (`etl.engines.unit_worker`).

    runner.send(unit)
    while (result := runner.receive()) is None: ...
    """

    def __init__(self, task: bytes, start_worker: StartWorker = start_worker) -> None:
        self.task = task
        self.is_decoding = False
        """Whether images of the unit are left: afterwards it is stored, which is waiting for disks most of the time."""
        self.is_retried = False
        """Whether the unit has ended a process, and runs for the second time or has."""
        self._start_worker = start_worker
        self._is_careful = False
        self._last_begun = ""
        self._start()

    @property
    def answers(self) -> int:
        """The pipe that becomes readable when `receive` has an answer; it may be another one after each None."""
        return self._process.answers

    def send(self, unit: bytes) -> None:
        """Begin with a unit; the one before must be finished."""
        self._unit = unit
        self._last_begun = ""
        self.is_decoding, self.is_retried = True, False
        self._process.send({}, unit)

    def receive(self) -> bytes | None:
        """The result of the unit that was sent last; None if there is none yet.

        Either its images are decoded, as `is_decoding` tells then, or it ended the process and is run again, carefully,
        or a careful process has begun with an image.
        Raises the unit's own error; StorageError if it ends the careful process as well: its images were decoded apart,
        so it is this machine.
        """
        try:
            header, result = self._process.receive()
        except ChildDied as died:
            self._run_again(died)
            return None
        if "error" in header:
            kind = getattr(errors, header["error"], errors.ShardmillError)
            error = kind(*header["parts"], detail=header["detail"])
            # Where it was raised there, for --debug.
            if header["note"]:
                error.add_note(header["note"])
            raise error
        if "begun" in header:
            self._last_begun = f"; the last image that it started was {printable(header['begun'])}"
            return None
        self.is_decoding = False
        return None if header.get("is_decoded") else result

    def close(self) -> None:
        """End the process."""
        self._process.end()

    def _start(self) -> None:
        self._process = self._start_worker()
        self._process.send({"is_careful": self._is_careful}, self.task)

    def _run_again(self, died: ChildDied) -> None:
        if self._is_careful:
            raise errors.StorageError(
                f"the process of work unit {json.loads(self._unit)['index']} ended twice ({died}{self._last_begun})",
                "its images were decoded in another process, so no image was the cause",
                "free memory on this machine, or run fewer units at once (etl.num_workers; on Spark, fewer cores per "
                "executor); finished units are kept",
            ) from None
        # From now on: where one image ends a process, others often do.
        self._is_careful = True
        self._start()
        self.send(self._unit)
        self.is_retried = True


_warm: UnitRunner | None = None


def run_in_warm_process(
    task: bytes, units: Iterable[bytes], count_retries: Callable[[int], object] = lambda number: None
) -> None:
    """Run units, one after the other, in a process that is kept for those of the next call with the same task.

    Raises as `UnitRunner.receive` does. For one thread; results are in the units' records.
    """
    global _warm
    for unit in units:
        if _warm is None or _warm.task != task:
            end_warm_process()
            _warm = UnitRunner(task)
        try:
            _warm.send(unit)
            while _warm.receive() is None:
                pass
            count_retries(int(_warm.is_retried))
        except BaseException:
            # The next unit must not take this one's answer for its own.
            end_warm_process()
            raise


def run_units_of_task(task: bytes, units: Iterable[bytes], *, are_attempts_counted: bool) -> Iterator[tuple[int]]:
    """Run the units of a task of Spark; yields how many attempts at them have failed before, if there were any.

    Spark Connect has no accumulators and tells of no failed task, so the attempt that succeeds does.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    num_failed = context.attemptNumber() if context is not None and are_attempts_counted else 0
    retries = [num_failed]
    run_in_warm_process(task, units, retries.append)
    if any(retries):
        yield (sum(retries),)


def end_warm_process() -> None:
    """End the process of `run_in_warm_process`, if there is one; the next call starts another."""
    global _warm
    if _warm is not None:
        _warm.close()
    _warm = None


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
