"""Work units in a process of their own, as every engine runs them: an image that ends the process ends no engine.

The process decodes inside itself, which costs nothing. If an image ends it, its unit is run again by a careful process,
which decodes in a child of its own and so finds out which image it was. Light, because each Python worker of Spark's
imports it: tasks, units and results are JSON here (`etl.engines.unit_json`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import etl
from shardmill import errors
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.messages import pack_message, read_message

# The working directory is in none of the paths; ours come last, behind the interpreter's own.
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from etl.engines.unit_worker import main; main()"


class UnitRunner:
    """Runs the units of one task, one at a time, in a warm process that ends with this one (`etl.engines.unit_worker`).

    runner.send(unit)
    while (result := runner.receive()) is None: ...
    """

    def __init__(self, task: bytes) -> None:
        self.task = task
        self._is_careful = False
        self._start()

    @property
    def answers(self) -> IO[bytes]:
        """What becomes readable if `receive` has an answer; another one whenever it gave None."""
        assert self._process.stdout is not None
        return self._process.stdout

    def send(self, unit: bytes) -> None:
        """Begin with a unit; the one before must be finished."""
        self._unit = unit
        self._write({}, unit)

    def receive(self) -> bytes | None:
        """The result of the unit that was sent last; None if it ended the process, and is run again carefully.

        Raises the unit's own error; StorageError if it ends the careful process as well: its images were decoded apart,
        so it is this machine.
        """
        message = read_message(self.answers)
        if message is not None:
            header, result = message
            if "error" in header:
                kind = getattr(errors, header["error"], errors.ShardmillError)
                raise kind(*header["parts"], detail=header["detail"])
            return result
        if self._is_careful:
            raise errors.StorageError(
                f"the process of work unit {json.loads(self._unit)['index']} ended twice "
                f"(exit status {self._process.wait()})",
                "its images were decoded in a process of their own, so it was not one of them",
                "see that this machine has memory left, or lower etl.num_workers; finished units are kept",
            )
        # From now on: where one image ends a process, others often do.
        self.close()
        self._is_careful = True
        self._start()
        self.send(self._unit)
        return None

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        # Closing its pipes flushes what it ended too early to read.
        with suppress(BrokenPipeError), self._process:  # closes its pipes and waits for it
            pass

    def _start(self) -> None:
        root = str(Path(etl.__file__).parent.parent)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, root, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Its numeric libraries' threads would compete with the other workers.
            env={**os.environ, **SAFE_PATH, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        )
        self._write({"is_careful": self._is_careful}, self.task)

    def _write(self, header: dict[str, bool], body: bytes) -> None:
        requests = self._process.stdin
        assert requests is not None
        try:
            for part in pack_message(header, body):
                requests.write(part)
            requests.flush()
        except BrokenPipeError:
            pass  # `receive` finds that it has ended


_warm: UnitRunner | None = None


def run_in_warm_process(task: bytes, units: Iterable[bytes]) -> None:
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
        except BaseException:
            # The next unit must not take this one's answer for its own.
            end_warm_process()
            raise


def end_warm_process() -> None:
    """End the process of `run_in_warm_process`, if there is one; the next call starts another."""
    global _warm
    if _warm is not None:
        _warm.close()
    _warm = None
