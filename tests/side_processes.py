"""Side processes of the planning (`train.launching.side_process`) that fork from one that has imported their framework.

For what they compute: the imports take 3 seconds of each. The fixture `forked_planning` asks for it; those that
commands start, and those of test_side_process.py, begin as they are.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.processes import RANK_MODULES
from tests.quick_start.forked import ForkedProcess, Program, parent_of_forks
from train.launching import side_process

# What their main programs hand to `answer`: the task's type, and the work.
_FORKED = {
    "train.planning.build_model": ("BuildTask", "build"),
    "train.planning.pace": ("PaceTask", "measure"),
    "train.planning.probe": ("ProbeTask", "measure"),
    "train.planning.state_program": ("StateTask", "count"),
}
# Enough for steps of milliseconds; it is computing all the while.
_MEASURED_SECONDS = 1.0


@contextmanager
def forked_side_processes() -> Iterator[None]:
    """All that this process asks in this block, but those whose memory is measured: malloc reads its settings once."""
    start_python = side_process.start_python

    def start(options: Sequence[str], environment: Mapping[str, str], **how: Any) -> Any:
        if options[1] not in _FORKED or "MALLOC_TRIM_THRESHOLD_" in environment:
            return start_python(options, environment, **how)
        return _ForkedWithTask(options[1], Path(options[2]), environment, how["stdout"].name)

    with patch.object(side_process, "start_python", start):
        yield


class _ForkedWithTask:
    """The part of a `subprocess.Popen` that `ask` needs. It forks when its task comes, which names the framework."""

    def __init__(self, module: str, answer: Path, environment: Mapping[str, str], output: str) -> None:
        self._module, self._answer, self._environment, self._output = module, answer, environment, output
        self.stdin = self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, task: bytes) -> None:
        file = self._answer.with_name("task")
        file.write_bytes(task)
        document = json.loads(task)
        modules = RANK_MODULES[(document.get("config") or document["configs"][0])["backend"]]
        arguments = ("-m", str(self._answer), self._module, str(file), self._output, str(parent_of_forks(modules)))
        program = Program("tests.side_processes:answer_forked", arguments, os.getcwd(), self._environment)
        self._process = ForkedProcess(modules, program, is_one_output=True)
        # It writes into files.
        self._process.stdout.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


def answer_forked() -> None:
    """The program of such a process: what `python -m MODULE ANSWER PARENT` does, with the task on stdin."""
    _, _, module, task, output, _ = sys.argv
    for file, flags, descriptors in ((task, os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_APPEND, (1, 2))):
        opened = os.open(file, flags)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)
    sys.stdin = open(0)  # noqa: SIM115
    sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path not in sys.path]
    program: Any = importlib.import_module(module)
    if hasattr(program, "MEASURED_SECONDS"):
        program.MEASURED_SECONDS = program.CACHED_SECONDS = _MEASURED_SECONDS
    kind, work = _FORKED[module]
    side_process.answer(getattr(program, kind), getattr(program, work))
