"""`python -m tests.train.rank_server DESCRIPTOR MODULE...` imports the modules once, and forks a rank for each request.

Nothing of a framework runs here, so that a fork is as new as a process that has just imported the same. A request comes
over the socket DESCRIPTOR with two pipes: for the rank's output, and for its process id and how it ends.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
from typing import NoReturn

MAX_REQUEST = 200_000


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    ended, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    ends: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 1000)
            tell_ends(ends)
        if requests in ready:
            request, pipes, _, _ = socket.recv_fds(requests, MAX_REQUEST, 2)
            if not request:
                return
            output, end = pipes
            pid = os.fork()
            if pid == 0:
                become_rank(json.loads(request), output)
            ends[pid] = end
            os.write(end, f"{pid}\n".encode())
            os.close(output)


def tell_ends(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = ends.pop(pid)
        os.write(end, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(end)


def become_rank(environment: dict[str, str], output: int) -> NoReturn:
    server = os.getppid()
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.argv[1:] = [str(server)]
    import numpy as np

    from train.launching.rank import main as run_rank

    np.random.seed()
    run_rank()


if __name__ == "__main__":
    main()
