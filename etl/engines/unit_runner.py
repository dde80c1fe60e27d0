"""Work units in a process of their own, as every engine runs them: an image that ends the process ends no engine.

The process decodes inside itself, which costs nothing. If an image ends it, its unit is run again by a careful process,
which decodes in a child of its own and so finds out which image it was.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter

import etl
from etl.units import UnitTask, WorkUnit
from shardmill import errors
from shardmill.dataset.unit_result import UnitResult, decode_unit_result
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.messages import pack_message, read_message

# Made once: making one takes longer than sending ten units.
_TASK, _UNIT = TypeAdapter(UnitTask), TypeAdapter(WorkUnit)
# The working directory is in none of the paths; ours come last, behind the interpreter's own.
_BOOTSTRAP = "import sys; sys.path.append(sys.argv[1]); from etl.engines.unit_worker import main; main()"


class UnitRunner:
    """Runs the units of one task, one at a time, in a warm process that ends with this one (`etl.engines.unit_worker`).

    runner.send(unit)
    while (result := runner.receive()) is None: ...
    """

    def __init__(self, task: UnitTask) -> None:
        self.task = task
        self._is_careful = False
        self._start()

    @property
    def answers(self) -> IO[bytes]:
        """What becomes readable if `receive` has an answer; another one whenever it gave None."""
        assert self._process.stdout is not None
        return self._process.stdout

    def send(self, unit: WorkUnit) -> None:
        """Begin with a unit; the one before must be finished."""
        self._unit = unit
        self._write({}, _UNIT.dump_json(unit))

    def receive(self) -> UnitResult | None:
        """The result of the unit that was sent last; None if it ended the process, and is run again carefully.

        Raises the unit's own error; StorageError if it ends the careful process as well: its images were decoded apart,
        so it is this machine.
        """
        message = read_message(self.answers)
        if message is not None:
            return _result(*message)
        if self._is_careful:
            raise errors.StorageError(
                f"the process of work unit {self._unit.index} ended twice (exit status {self._process.wait()})",
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
        with self._process:  # closes its pipes and waits for it
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
        self._write({"is_careful": self._is_careful}, _TASK.dump_json(self.task))

    def _write(self, header: dict[str, bool], body: bytes) -> None:
        requests = self._process.stdin
        assert requests is not None
        try:
            for part in pack_message(header, body):
                requests.write(part)
            requests.flush()
        except BrokenPipeError:
            pass  # `receive` finds that it has ended


def _result(header: dict[str, str], body: bytes) -> UnitResult:
    if "error" in header:
        kind = getattr(errors, header["error"], errors.ShardmillError)
        raise kind(*header["parts"], detail=header["detail"])
    return decode_unit_result(body)
