"""A command ends with the script that runs it in its foreground, and with nothing else that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import hears_all_signals

COMMAND = """
import os, time
from shardmill.jobs.ending import end_with_script
from shardmill.jobs.process import Terminated, raise_on_signals, stopping_in_order
raise_on_signals()
end_with_script()
before = os.getppid()
try:
    with stopping_in_order(60.0) as request:
        print(before, flush=True)
        # Two seconds are given to a request that may not come.
        deadline = time.monotonic() + (60.0 if os.environ["EXPECTED"] == "ends" else 2.0)
        while not request.is_made and time.monotonic() < deadline:
            time.sleep(0.02)
    print("goes on", "orphaned" if os.getppid() != before else "not orphaned", flush=True)
except Terminated as ended:
    print(ended, flush=True)
"""
ENDS = "terminated by SIGTERM; what was under way has been finished\n"
THREAD = """
import subprocess, sys, threading
started = []
thread = threading.Thread(target=lambda: started.append(subprocess.Popen([sys.executable, "-c", sys.argv[1]])))
thread.start()
thread.join()
started[0].wait()
"""


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


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ('"$PYTHON" -c "$COMMAND"; true', ENDS),
        ('"$PYTHON" -c "$COMMAND" & wait', "goes on orphaned\n"),
        ('nohup "$PYTHON" -c "$COMMAND"; true', "goes on orphaned\n"),
        ('setsid "$PYTHON" -c "$COMMAND"; true', "goes on orphaned\n"),
        ('set -m; "$PYTHON" -c "$COMMAND"; true', "goes on orphaned\n"),
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


def test_the_end_of_the_thread_that_started_a_command_is_not_the_end_of_its_parent():
    program = started([sys.executable, "-c", THREAD, COMMAND], "goes on")
    assert program.stdout is not None
    assert program.stdout.read() == f"{program.pid}\ngoes on not orphaned\n"
