"""The launcher `local` with ranks that are forked from a process that has imported their framework (rank_server.py).

For tests of what ranks compute: the imports take 3 seconds of each. How ranks start and end is tested with processes as
they are. (`multiprocessing` has such a server too, whose children are no programs with an output.)
"""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import python_path
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching import LAUNCHERS, agent
from train.launching.rank import DEFAULT_WORKER
from train.reporting.observer import TrainObserver

# What a rank of each backend imports. PyTorch imports its compilers when deterministic algorithms are switched on.
_MODULES = {
    "keras": ("tensorflow", "train.launching.rank", "train.rank.worker", "train.backends.keras.backend"),
    "torch": (
        "torch",
        "torch._inductor.config",
        "train.launching.rank",
        "train.rank.worker",
        "train.backends.torch.backend",
    ),
}


class ForkedRank:
    """What `train.launching.agent` uses of a `subprocess.Popen`."""

    def __init__(self, server: socket.socket, environment: dict[str, str]) -> None:
        output, written = os.pipe()
        end, told = os.pipe()
        socket.send_fds(server, [json.dumps(environment).encode()], [written, told])
        os.close(written)
        os.close(told)
        self.stdout = open(output, "rb")  # noqa: SIM115  as long as its reader
        self._end = open(end)  # noqa: SIM115
        self.pid = int(self._end.readline())
        self.returncode: int | None = None
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()

    def _wait(self) -> None:
        with self._end:
            self.returncode = int(self._end.readline())

    def poll(self) -> int | None:
        return self.returncode

    def wait(self) -> int:
        self._waiting.join()
        assert self.returncode is not None
        return self.returncode


@functools.cache
def _server(backend: str) -> socket.socket:
    """It ends with this process, whose end of the connection is the only one."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.train.rank_server", str(its.fileno()), *_MODULES[backend]]
    environment = {**os.environ, "PYTHONPATH": python_path(), "TF_CPP_MIN_LOG_LEVEL": "2"}
    subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], start_new_session=True)
    its.close()
    return ours


def launch_forked(task: WorkerTask, observer: TrainObserver, worker: str = DEFAULT_WORKER) -> TrainResult:
    """As `LAUNCHERS["local"].launch` does."""

    def start(command: list[str], *, env: dict[str, str], **how: Any) -> ForkedRank:
        assert command[1:3] == ["-m", "train.launching.rank"] and how.pop("start_new_session")
        return ForkedRank(_server(task.config.backend), env)

    stand_in = SimpleNamespace(**{**vars(subprocess), "Popen": start})
    with patch.object(agent, "subprocess", stand_in):
        return LAUNCHERS["local"].launch(task, SparkConfig(), observer, worker=worker)
