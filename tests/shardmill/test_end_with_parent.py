"""A command ends with the script that runs it in its foreground, and with nothing else that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import hears_all_signals

COMMAND = "tests.programs.end_with_its_script"
ENDS = "terminated by SIGTERM; the current operation was finished\n"


def started(arguments: list[str], expected: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "EXPECTED": expected, "COMMAND": COMMAND, "PYTHON": sys.executable}
    return subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=hears_all_signals,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('"$PYTHON" -m "$COMMAND"; true', ENDS),
        ('"$PYTHON" -m "$COMMAND" & wait', "goes on orphaned\n"),
        ('nohup "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
        ('setsid "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
        ('set -m; "$PYTHON" -m "$COMMAND"; true', "goes on orphaned\n"),
    ],
    ids=["foreground", "background", "nohup", "setsid", "job"],
)
def test_a_command_in_the_foreground_of_a_script_ends_with_it(script: str, expected: str):
    shell = started(["bash", "-c", script], "ends" if expected == ENDS else "goes on")
    assert shell.stdout is not None
    # The command is ready, and a child of the shell.
    assert int(shell.stdout.readline()) == shell.pid
    os.kill(shell.pid, signal.SIGKILL)
    assert shell.stdout.read() == expected


@pytest.mark.starts("program")
def test_the_end_of_the_thread_that_started_a_command_is_not_the_end_of_its_parent():
    program = started([sys.executable, "-m", "tests.programs.start_from_a_thread", COMMAND], "goes on")
    assert program.stdout is not None
    assert program.stdout.read() == f"{program.pid}\ngoes on not orphaned\n"
