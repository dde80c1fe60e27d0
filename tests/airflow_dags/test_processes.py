"""A task's child processes end with it: asked first, then killed, also if the task's own process is killed."""

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
from tests.lab.commands import ENVIRONMENT

pytestmark = pytest.mark.starts("program")

_WAIT_SECONDS = 120.0
HEARS_SIGTERM, DRIVER = "tests.programs.hear_sigterm", "tests.programs.end_with_its_parent"
STARTS_CHILD = "tests.programs.start_child"

# As an ordinary user, from whom the kernel hides what root sees.
ORDINARY = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"] if os.geteuid() == 0 else []


def started(program: str, *of_programs: str, **more: Any) -> subprocess.Popen[str]:
    """A process of one of `tests.programs`, when it or one that it starts is ready. `more`: arguments of Popen."""
    command = [*ORDINARY, sys.executable, "-m", program, *of_programs]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, **more)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def test_a_process_is_asked_to_end_and_killed_if_it_does_not_listen(monkeypatch: pytest.MonkeyPatch):
    listening = started(HEARS_SIGTERM)
    end_in_order(listening)
    assert listening.returncode == 7
    end_in_order(listening)

    monkeypatch.setattr(processes, "END_SECONDS", 0.2)
    deaf = started(HEARS_SIGTERM, "deaf")
    end_in_order(deaf)
    assert deaf.wait(_WAIT_SECONDS) == -signal.SIGKILL


def test_only_the_driver_below_spark_submit_is_asked():
    jvm = started(STARTS_CHILD, HEARS_SIGTERM)
    [driver] = children_that_run(HEARS_SIGTERM, jvm.pid)
    assert Path(f"/proc/{driver}").exists() and not children_that_run("another.py", jvm.pid)
    end_in_order(jvm, lambda pid: children_that_run(HEARS_SIGTERM, pid))
    assert jvm.returncode == 7


def test_a_driver_ends_in_order_although_its_task_and_spark_submit_are_killed():
    task = started("tests.programs.start_tied_child", STARTS_CHILD, DRIVER)
    assert task.stdout is not None
    os.kill(task.pid, signal.SIGKILL)
    # The end of the pipe, which all three held: none of them is left.
    assert task.stdout.read() == "terminated by SIGTERM; the current operation was finished\n"
    assert task.wait(_WAIT_SECONDS) == -signal.SIGKILL


def test_a_driver_ends_in_order_although_the_worker_of_its_task_is_killed():
    worker = started("tests.programs.supervise_a_task", DRIVER)
    assert worker.stdout is not None
    os.kill(worker.pid, signal.SIGKILL)
    # As above: neither the task nor its driver is left.
    told, _ = worker.communicate(timeout=_WAIT_SECONDS)
    assert told == "terminated by SIGTERM; the current operation was finished\n"
    assert worker.wait(_WAIT_SECONDS) == -signal.SIGKILL


@pytest.mark.parametrize("kind", ["null", "closed", "pipe", "socket of another"])
def test_a_task_whose_parent_is_a_shell_has_no_worker(kind: str):
    of_another, theirs = socket.socketpair()
    stdin = {"null": subprocess.DEVNULL, "pipe": subprocess.PIPE, "socket of another": theirs.fileno()}.get(kind)
    shell = started(
        STARTS_CHILD,
        "tests.programs.task_of_a_shell",
        stdin=stdin,
        preexec_fn=partial(os.close, 0) if kind == "closed" else None,
    )
    with of_another, theirs:
        os.kill(shell.pid, signal.SIGKILL)
        assert shell.communicate(timeout=_WAIT_SECONDS)[0] == "goes on\n"
