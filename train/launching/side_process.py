"""Runs work in a separate process, because a framework or a user's code may print, crash, hang or exit.

That process is `python -m MODULE ANSWER PARENT`: its task comes on stdin, its answer goes into the file ANSWER.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardmill.child_process import end_with_parent, kill_session, start_python
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.process import SAFE_PATH, python_path, scratch_folder
from shardmill.registry import line_of_user_in_dump
from train.config import TrainConfig
from train.contracts.values import from_json, to_json
from train.launching.devices import CUDA_VARIABLE
from train.launching.messages import Failure
from train.launching.rank_failures import failure_of, how_it_ended, last_line

Value = TypeVar("Value")

ANSWERED_HERE: dict[str, tuple[type[Any], Callable[[Any], object]]] = {}
"""Modules whose work `ask` does in this process, without another: each with the type of its task. For a process that
has the framework and may be changed by it.
"""

MAX_TAIL = 4000
# For the stacks of its threads, which it writes when it is aborted.
DUMP_SECONDS = 10.0
_VALUE, _FAILURE = b"value ", b"failure "


@dataclass(frozen=True, slots=True)
class Question:
    """The request and its recipient."""

    module: str
    """Module whose main program calls `answer`."""
    task: bytes
    """JSON."""
    environment: Mapping[str, str]
    """Variables added to this process's own."""
    timeout_seconds: float | None
    key: str = ""
    """Config key of that time limit, for people."""


def ask(question: Question, kind: type[Value], refusal: Callable[[str], ShardmillError]) -> Value:
    """Return the answer of `answer` from the other process, which has ended on return, with all its children.

    Raises a ShardmillError of its work as it was raised there, and `refusal(how it ended)` for any other end. Traceback
    and last output are notes of either.
    """
    if question.module in ANSWERED_HERE:
        kind_of_task, work = ANSWERED_HERE[question.module]
        return from_json(kind, to_json(work(from_json(kind_of_task, question.task))))
    with scratch_folder("") as folder:
        returncode, is_late = _run(question, folder)
        said = _read(folder / "answer")
        # Behind the stacks of a crash Python lists all that was imported.
        tail = re.sub(r"\nExtension modules: .*", "", _read(folder / "output").decode(errors="replace"))[-MAX_TAIL:]
    if said.startswith(_VALUE):
        return from_json(kind, said.removeprefix(_VALUE))
    failure = from_json(Failure, said.removeprefix(_FAILURE)) if said else None
    if failure is not None and failure.is_ours:
        error = failure.as_raised()
    elif failure is not None:
        error = refusal(f"failed: {failure}")
    else:
        error = refusal(_how_it_ended(question, returncode, tail, is_late=is_late))
    if failure is not None:
        error.add_note(failure.traceback)
    if tail:
        error.add_note(f"its last output:\n{tail}")
    raise error


def ask_of_model(module: str, task: bytes, kind: type[Value], config: TrainConfig, *, fails: str, steps: str) -> Value:
    """`ask` about the config's model, on the CPU. `fails`, `steps`: what the model then does not, and what was done."""

    def refusal(how: str) -> UsageError:
        return UsageError(
            f"train.model = {config.model!r} {fails}: the process that tried it {how}",
            f"the process {steps}",
            "call the factory in a Python shell for the full traceback",
        )

    limit, key = config.watch.start_timeout_seconds, "train.watch.start_timeout_seconds"
    return ask(Question(module, task, {CUDA_VARIABLE: "-1"}, limit, key), kind, refusal)


def answer(kind: type[Any], work: Callable[[Any], object]) -> None:
    """The main program of a module that is asked: does the work, and ends this process."""
    end_with_parent()
    # Where it stood, if it crashes or has to be aborted.
    faulthandler.enable()
    try:
        said = _VALUE + to_json(work(from_json(kind, sys.stdin.buffer.read())))
    except (Exception, SystemExit) as error:
        # A user's function may raise anything.
        said = _FAILURE + to_json(failure_of(error))
    file = Path(sys.argv[1])
    file.with_suffix(".part").write_bytes(said)
    file.with_suffix(".part").rename(file)
    # Not by Python's own end, which waits for a user's threads.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run(question: Question, folder: Path) -> tuple[int, bool]:
    """-> exit code, whether it was ended because it took too long."""
    environment = {**os.environ, "PYTHONPATH": python_path(), **SAFE_PATH, "TMPDIR": str(folder)}
    with (folder / "output").open("wb") as output:
        process = start_python(
            ["-m", question.module, str(folder / "answer")],
            {**environment, **question.environment},
            stdin=subprocess.PIPE,
            # Files: pipes would stay open for as long as anything lives that a user's code has started.
            stdout=output,
            stderr=output,
            own_session=True,
        )
    try:
        assert process.stdin is not None
        # One that ended at once is judged by its end.
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(question.task)
        return process.wait(question.timeout_seconds), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(DUMP_SECONDS)
        return -signal.SIGABRT, True
    finally:
        kill_session(process)
        process.wait()


def _how_it_ended(question: Question, returncode: int, tail: str, *, is_late: bool) -> str:
    line = line_of_user_in_dump(tail)
    where = f" ({line})" if line else ""
    if is_late:
        return f"did not finish within {question.key} = {question.timeout_seconds:g}{where}"
    said = "" if "Fatal Python error" in tail else last_line(tail)
    return f"{how_it_ended(returncode)}{where}{f': {said}' if said else ''}"


def _read(file: Path) -> bytes:
    return file.read_bytes() if file.exists() else b""
