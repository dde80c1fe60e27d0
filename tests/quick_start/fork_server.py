"""`python -m tests.quick_start.fork_server DESCRIPTOR MODULE...` imports the modules once, and forks for each request.

Nothing of a framework runs here, so that a fork is as new as a process that has just imported the same. A request comes
over the socket DESCRIPTOR with three pipes: for the outputs of the fork, and for its process id and how it ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NoReturn

MAX_REQUEST = 200_000
NUM_PIPES = 3
# A rank's main ends so by itself; a command ends as users' do.
_END_AT_ONCE = "tests.processes:call_and_return"


def main() -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # What there is now is never freed: looking at it would copy the pages that all forks share.
    gc.freeze()
    gc.enable()
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
            request, pipes, _, _ = socket.recv_fds(requests, MAX_REQUEST, NUM_PIPES)
            if not request:
                return
            *outputs, end = pipes
            pid = os.fork()
            if pid == 0:
                run_request(json.loads(request), outputs)
            ends[pid] = end
            os.write(end, f"{pid}\n".encode())
            for output in outputs:
                os.close(output)


def tell_ends(ends: dict[int, int]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        end = ends.pop(pid)
        os.write(end, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os.close(end)


def run_request(request: dict[str, Any], outputs: list[int]) -> NoReturn:
    """Call `module:function` as the program `arguments` in `directory`; what it returns is the exit code."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    for descriptor, name, buffering, errors in ((1, "stdout", -1, "strict"), (2, "stderr", 1, "backslashreplace")):
        os.dup2(outputs[descriptor - 1], descriptor)
        # The server's own streams may be files, which they remember.
        stream = open(descriptor, "w", buffering, errors=errors)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.closerange(3, 256)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.argv[:] = request["arguments"]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    module, _, function = request["function"].partition(":")
    called = getattr(importlib.import_module(module), function)
    if request["function"] == _END_AT_ONCE:
        end_at_once(called)
    sys.exit(called())


def end_at_once(called: Callable[[], object]) -> NoReturn:
    """Threads are awaited, exit functions called and outputs flushed; freeing what a framework holds takes longer than
    most calls do: of PyTorch 0.6 processor seconds, of TensorFlow 0.45.
    """
    code = 1
    try:
        code = called() or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
