"""`python -m tests.services.reaper COMMAND...`: a server, ended with all that it has started.

At SIGTERM, and if its parent dies. A mark in the environment would not find them all: Airflow's processes overwrite
theirs with a title.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from shardmill.child_process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """-> the server's exit code, or that of SIGTERM."""
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signal_number, frame: asked.append(signal_number))
    die_with_parent(os.getppid(), 1, by=signal.SIGTERM)
    # Whose parent dies becomes our child, and none gets away.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(sys.argv[1:])
    while server.poll() is None and not asked:
        time.sleep(0.1)
    while below := _descendants():
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    return 128 + signal.SIGTERM if asked else server.returncode


def _descendants() -> set[int]:
    """Ids of all processes below this one."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, waiting = set[int](), [os.getpid()]
    while waiting:
        parent = waiting.pop()
        children = {pid for pid, its_parent in parents.items() if its_parent == parent} - found
        found |= children
        waiting += children
    return found


if __name__ == "__main__":
    sys.exit(main())
