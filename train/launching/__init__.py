"""The ways in which ranks start; a new one is a module and an entry here, and the shared tests run over it.

Each entry is called as `launch(task, spark, observer)` in the driver's main thread. It returns rank 0's result when all
ranks have finished, raises the first failing rank's own error, and leaves no process behind either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig
    from train.observer import TrainObserver
    from train.values import TrainResult, WorkerTask


class Launcher(Protocol):
    """Starts the ranks of a task and waits for them; `worker` names what each rank runs, as `module:function`."""

    def __call__(
        self, task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = ...
    ) -> TrainResult: ...


LAUNCHERS: Registry[Launcher] = Registry(
    "train.launcher",
    {
        "inline": Entry("train.launching.inline:launch_inline", "this process, one rank"),
        "local": Entry(
            "train.launching.local:launch_local",
            "processes on this machine",
            extra="horovod",
            packages=("horovod",),
        ),
        "horovod_spark": Entry(
            "train.launching.horovod_spark:launch_horovod_spark",
            "Spark tasks, through horovod.spark.run",
            extra="spark,horovod",
            packages=("pyspark", "horovod"),
        ),
    },
    takes_own=True,
)
