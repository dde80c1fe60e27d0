"""The ways in which ranks start; a new one is one entry here, and the shared tests run over it.

Each entry is called as `launch(task, spark, observer)` in the driver's main thread. It returns rank 0's result when all
ranks have finished, raises the first failing rank's own error, and leaves no process behind either way.
"""

from __future__ import annotations

import difflib
from typing import Protocol

from shardmill.config import SparkConfig
from shardmill.errors import UsageError
from train.launchers.horovod_spark import launch_horovod_spark
from train.launchers.inline import launch_inline
from train.launchers.local import launch_local
from train.observer import TrainObserver
from train.rank import DEFAULT_WORKER
from train.values import TrainResult, WorkerTask

__all__ = ["LAUNCHERS", "Launcher", "find_launcher"]


class Launcher(Protocol):
    """Starts the ranks of a task and waits for them."""

    def __call__(
        self, task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
    ) -> TrainResult: ...


LAUNCHERS: dict[str, Launcher] = {
    "inline": launch_inline,
    "local": launch_local,
    "horovod_spark": launch_horovod_spark,
}


def find_launcher(name: str) -> Launcher:
    """The launcher of that name. Raises UsageError with the nearest one."""
    if name not in LAUNCHERS:
        near = difflib.get_close_matches(name, LAUNCHERS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"train.launcher = {name!r}", f"expected one of {', '.join(LAUNCHERS)}", hint)
    return LAUNCHERS[name]
