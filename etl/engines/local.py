"""The engine of one machine: a few processes that take work units from pipes; no Spark, no JVM, no pickle.

A worker decodes in its own process, which costs nothing. If an image ends the worker, its unit is run again by a
worker that decodes in a child of its own and so finds out which image it was.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from pydantic import TypeAdapter

import etl
from etl.engines import EngineSettings
from etl.units import UnitTask, WorkUnit
from shardmill import errors
from shardmill.dataset.unit_result import UnitResult, decode_unit_result
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.messages import pack_message, read_message

# Made once: making one takes longer than sending ten units.
_TASK, _UNIT = TypeAdapter(UnitTask), TypeAdapter(WorkUnit)
# The working directory is in none of the paths; ours come last, behind the interpreter's own.
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from etl.engines.local_worker import main; main()"


def run_locally(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Each unit's result as it finishes. Raises the first error that a unit raised, after ending all workers.

    A unit that ends its worker twice is a StorageError: its images were decoded apart, so it is this machine.
    """
    waiting = deque(units)
    num_workers = min(settings.num_workers or len(os.sched_getaffinity(0)), len(units))
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(num_workers):
            _give_next(waiting, selector, _Worker(stack, task, is_careful=False))
        while selector.get_map():
            for key, _ in selector.select():
                worker: _Worker = key.data
                selector.unregister(key.fileobj)
                answer = worker.receive()
                if answer is not None:
                    yield answer
                    _give_next(waiting, selector, worker)
                elif worker.is_careful:
                    raise errors.StorageError(
                        f"the process of work unit {worker.unit.index} ended twice ({worker.how_it_ended()})",
                        "its images were decoded in a process of their own, so it was not one of them",
                        "see that this machine has memory left, or lower etl.num_workers; finished units are kept",
                    )
                else:
                    careful = _Worker(stack, task, is_careful=True)
                    careful.send(worker.unit)
                    selector.register(careful.answers, selectors.EVENT_READ, careful)


def _give_next(waiting: deque[WorkUnit], selector: selectors.BaseSelector, worker: _Worker) -> None:
    if not waiting:
        return
    worker.send(waiting.popleft())
    selector.register(worker.answers, selectors.EVENT_READ, worker)


class _Worker:
    """A process with the task; it is killed when `stack` is left. A careful one decodes in a child of its own."""

    def __init__(self, stack: ExitStack, task: UnitTask, *, is_careful: bool) -> None:
        self.is_careful = is_careful
        root = str(Path(etl.__file__).parent.parent)
        # Its numeric libraries' threads would compete with the other workers.
        environment = {**os.environ, **SAFE_PATH, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        self._process = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", _BOOTSTRAP, root, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
        )
        stack.callback(self._process.kill)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self.answers = self._process.stdin, self._process.stdout
        self._write({"is_careful": is_careful}, _TASK.dump_json(task))

    def send(self, unit: WorkUnit) -> None:
        self.unit = unit
        self._write({}, _UNIT.dump_json(unit))

    def receive(self) -> UnitResult | None:
        """The result of the unit that was sent last; None if the process has ended. Raises the unit's own error."""
        message = read_message(self.answers)
        if message is None:
            return None
        header, body = message
        if "error" in header:
            kind = getattr(errors, header["error"], errors.ShardmillError)
            raise kind(*header["parts"], detail=header["detail"])
        return decode_unit_result(body)

    def how_it_ended(self) -> str:
        return f"exit status {self._process.wait()}"

    def _write(self, header: dict[str, bool], body: bytes) -> None:
        try:
            for part in pack_message(header, body):
                self._requests.write(part)
            self._requests.flush()
        except BrokenPipeError:
            pass  # `receive` finds that it has ended
