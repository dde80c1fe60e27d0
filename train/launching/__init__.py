"""The ways in which ranks start; a new one is a module and an entry here, and the shared tests run over it.

`launch(task, spark, observer)` is called in the driver's main thread. It returns rank 0's result when all ranks have
finished, raises the first failing rank's own error, and leaves no process behind either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from train.api import Launcher
    from train.config import TrainConfig

LAUNCHERS: Registry[Launcher] = Registry(
    "train.launcher",
    {
        "inline": Entry("train.launching.inline:INLINE", "this process, one rank"),
        "local": Entry(
            "train.launching.processes:LOCAL",
            "processes on this machine",
        ),
        "attach": Entry(
            "train.launching.attach:ATTACH",
            "processes that torchrun, SLURM, MPI or Kubernetes has started",
            options="train.launching.attach_options:AttachOptions",
        ),
        "spark_barrier": Entry(
            "train.launching.spark_barrier:SPARK_BARRIER",
            "Spark tasks of one barrier stage, for any strategy",
            extra="spark",
            packages=("pyspark",),
        ),
        "horovod_spark": Entry(
            "train.launching.horovod_spark:HOROVOD_SPARK",
            "Spark tasks, through horovod.spark.run",
            extra="spark,horovod",
            packages=("pyspark", "horovod"),
        ),
    },
    takes_own=True,
    options_prefix="",
    point=ExtensionPoint("how ranks start", "train.api:Launcher"),
)


def is_on_spark(launcher: str) -> bool:
    """Whether its ranks are Spark tasks; found without loading it."""
    return "pyspark" in LAUNCHERS.entry(launcher).packages


def launcher_of(config: TrainConfig) -> Launcher | None:
    """Return the launcher that `train.launcher` names; None if it is `auto`."""
    return None if config.launcher == "auto" else LAUNCHERS[config.launcher]
