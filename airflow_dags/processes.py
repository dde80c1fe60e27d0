"""Ends a task's processes together: the task's process ends with its Airflow worker, and its children end with the
task's process, in order if there is time and otherwise at once.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# A training writes a checkpoint, the ETL leaves its finished units. Airflow itself gives a task that it ends 5 s.
END_SECONDS = 20.0
# Linux's `struct ucred`: pid, uid, gid.
_UCRED = struct.Struct("3i")


def end_with_worker(by: signal.Signals = signal.SIGTERM) -> None:
    """Let the kernel ask this process, a task's, to end when the worker that has forked it is gone, as Airflow would.

    By SIGKILL it ends unasked, and leaves on a cluster what is there. A task in the process of a command (`airflow dags
    test`), whose parent is a shell, has no worker. Nor has one of another user (`run_as_user`), whose parent is sudo.
    """
    from shardmill.child_process import die_with_parent

    worker = os.getppid()
    # 0: one outside of this container, whichever it is.
    if worker and _pid_behind_stdin() == worker:
        die_with_parent(worker, 1, by=by)


def _pid_behind_stdin() -> int | None:
    """Return the process that created the socket that is this process's stdin (SO_PEERCRED in unix(7)); None if stdin
    is not such a socket.

    Airflow's supervisor talks to its task through one. It lets nobody look into its /proc, being non-dumpable.
    """
    with suppress(OSError):  # no stdin at all
        if stat.S_ISSOCK(os.fstat(0).st_mode):
            with socket.socket(fileno=os.dup(0)) as stdin:
                if stdin.family == socket.AF_UNIX:
                    return _UCRED.unpack(stdin.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    return None


def tied_to_this_process() -> dict[str, Any]:
    """Arguments of Popen: the kernel kills that process with this one; a signal to this one's group is not its own."""
    from shardmill.child_process import die_with_parent

    return {"start_new_session": True, "preexec_fn": partial(die_with_parent, os.getpid(), 1)}


def end_in_order(process: subprocess.Popen[str], workers: Callable[[int], Iterable[int]] = lambda pid: (pid,)) -> None:
    """SIGTERM to the `workers` of a process, given by its id; it is killed if it has not ended after END_SECONDS."""
    if process.poll() is not None:
        return
    for pid in list(workers(process.pid)) or [process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def children_that_run(script: str, parent: int) -> list[int]:
    """Ids of the processes that `parent` has started with `script` among their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            # The name, in parentheses, may hold anything; the parent's id is the second field behind it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent and script.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
