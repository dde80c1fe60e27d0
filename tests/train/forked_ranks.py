"""The launcher `local` with ranks that are forked from a process that has imported their framework.

For tests of what ranks compute: the imports take 3 seconds of each. How ranks start and end is tested with processes as
they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from shardmill.jobs.config import SparkConfig
from tests.processes import RANK_MODULES
from tests.quick_start.forked import ForkedProcess, Program, parent_of_forks
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching import LAUNCHERS, processes
from train.launching.rank import DEFAULT_WORKER
from train.reporting.observer import TrainObserver


@contextmanager
def forked_ranks(backend: str) -> Iterator[None]:
    """All ranks that the launcher `local` starts in this block are forked."""
    modules = RANK_MODULES[backend]

    def start(options: list[str], environment: dict[str, str], **how: Any) -> ForkedProcess:
        assert options == ["-m", "train.launching.rank"] and how["own_session"]
        arguments = ("rank", str(parent_of_forks(modules)))
        program = Program("train.launching.rank:main", arguments, os.getcwd(), environment)
        return ForkedProcess(modules, program, is_one_output=True)

    with patch.object(processes, "start_python", start):
        yield


def launch_forked(task: WorkerTask, observer: TrainObserver, worker: str = DEFAULT_WORKER) -> TrainResult:
    """As `LAUNCHERS["local"].launch` does."""
    with forked_ranks(task.config.backend):
        return LAUNCHERS["local"].launch(task, SparkConfig(), observer, worker=worker)
