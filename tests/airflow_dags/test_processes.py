"""What a task starts ends with it: asked, killed if it does not listen, and if the task's own process is killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from airflow_dags import processes
from airflow_dags.processes import children_that_run, end_in_order
from tests.pipeline.command import ENVIRONMENT

_WAIT_SECONDS = 120.0
LISTENS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
SLEEPS = "print('ready', flush=True); time.sleep(600)"
# A task's process that has started a command, whose Spark driver is the last of them.
TASK = """
import subprocess, sys
from airflow_dags.processes import tied_to_this_process
process = subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]], **tied_to_this_process())
process.wait()
"""
# Airflow's worker forks the task's process, whose stdin is a socket between the two, and lets nobody look into its own
# /proc (PR_SET_DUMPABLE). The task ends what it has started when it is asked to end itself.
WORKER = """
import ctypes, os, signal, socket, subprocess, sys, time
from airflow_dags.processes import end_in_order, end_with_worker, tied_to_this_process
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
requests, ours = socket.socketpair()
if os.fork():
    time.sleep(600)
os.dup2(requests.fileno(), 0)
end_with_worker()
command = [sys.executable, "-c", sys.argv[1]]
process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **tied_to_this_process())
signal.signal(signal.SIGTERM, lambda *_: end_in_order(process))
for line in process.stdout:
    print(line, end="", flush=True)
sys.exit(process.wait())
"""
SHELL = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
TASK_IN_A_COMMAND = """
import os, time
from airflow_dags.processes import end_with_worker
end_with_worker()
shell = os.getppid()
print("ready", flush=True)
while os.getppid() == shell:
    time.sleep(0.02)
print("goes on", flush=True)
"""
JVM = """
import subprocess, sys
driver = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
driver.wait()
"""
DRIVER = """
import time
from shardmill.jobs.ending import end_with_parent
from shardmill.jobs.process import Terminated, raise_on_signals, stopping_in_order
raise_on_signals()
end_with_parent()
try:
    with stopping_in_order(60.0) as request:
        print("ready", flush=True)
        while not request.is_made:
            time.sleep(0.02)
except Terminated as ended:
    print(ended, flush=True)
"""


# As an ordinary user, from whom the kernel hides what root sees.
ORDINARY = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"] if os.geteuid() == 0 else []


def started(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    """A Python process that has said it is ready. `more`: arguments of Popen."""
    command = [*ORDINARY, sys.executable, "-c", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, **more)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_process_is_asked_to_end_and_killed_if_it_does_not_listen(monkeypatch: pytest.MonkeyPatch):
    listening = started(f"{LISTENS}; {SLEEPS}")
    end_in_order(listening)
    assert listening.returncode == 7
    end_in_order(listening)

    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    deaf = started(f"{IGNORES}; {SLEEPS}")
    end_in_order(deaf)
    assert deaf.wait(_WAIT_SECONDS) == -signal.SIGKILL


def test_only_the_driver_below_spark_submit_is_asked():
    jvm = started(f"{JVM}\nsys.exit(driver.returncode)", f"{LISTENS}; {SLEEPS}")
    [driver] = children_that_run(f"{LISTENS}; {SLEEPS}", jvm.pid)
    assert Path(f"/proc/{driver}").exists() and not children_that_run("another.py", jvm.pid)
    end_in_order(jvm, lambda pid: children_that_run(f"{LISTENS}; {SLEEPS}", pid))
    assert jvm.returncode == 7


def test_a_driver_ends_in_order_although_its_task_and_spark_submit_are_killed():
    task = started(TASK, JVM, DRIVER)
    assert task.stdout is not None
    os.kill(task.pid, signal.SIGKILL)
    # The end of the pipe, which all three held: none of them is left.
    assert task.stdout.read() == "terminated by SIGTERM; what was under way has been finished\n"
    assert task.wait(_WAIT_SECONDS) == -signal.SIGKILL


def test_a_driver_ends_in_order_although_the_worker_of_its_task_is_killed():
    worker = started(WORKER, DRIVER)
    assert worker.stdout is not None
    os.kill(worker.pid, signal.SIGKILL)
    # As above: neither the task nor its driver is left.
    told, _ = worker.communicate(timeout=_WAIT_SECONDS)
    assert told == "terminated by SIGTERM; what was under way has been finished\n"
    assert worker.wait(_WAIT_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["null", "closed", "pipe", "socket of another"])
def test_a_task_whose_parent_is_a_shell_has_no_worker(kind: str):
    of_another, theirs = socket.socketpair()
    stdin = {"null": subprocess.DEVNULL, "pipe": subprocess.PIPE, "socket of another": theirs.fileno()}.get(kind)
    shell = started(
        SHELL, TASK_IN_A_COMMAND, stdin=stdin, preexec_fn=partial(os.close, 0) if kind == "closed" else None
    )
    with of_another, theirs:
        os.kill(shell.pid, signal.SIGKILL)
        assert shell.communicate(timeout=_WAIT_SECONDS)[0] == "goes on\n"
