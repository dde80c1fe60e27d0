"""The ways in which ranks start; a new one is a module and an entry here, and the shared tests run over it.

`launch(task, spark, observer)` is called in the driver's main thread. It returns rank 0's result when all ranks have
finished, raises the first failing rank's own error, and leaves no process behind either way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from shardmill.jobs.config import SparkConfig
    from train.config import TrainConfig
    from train.contracts.task import WorkerTask
    from train.contracts.values import TrainResult
    from train.reporting.observer import TrainObserver


class Launch(Protocol):
    """Starts the ranks of a task and waits for them; `worker` names what each rank runs, as `module:function`."""

    def __call__(
        self, task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = ...
    ) -> TrainResult: ...


def _no_limit(world_size: int, spark: SparkConfig) -> None:
    return


def _assigns_none(spark: SparkConfig) -> bool:
    return False


def _none_here(world_size: int, spark: SparkConfig) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start ranks, and what is known of it before any rank starts."""

    launch: Launch
    check: Callable[[int, SparkConfig], None] = _no_limit
    """(world size, section `spark`): raises UsageError if so many ranks cannot start, as far as that is known."""
    strategies: tuple[str, ...] | None = None
    """Strategies whose ranks it can start; None: all, because ranks meet through their driver."""
    ranks_here: Callable[[int, SparkConfig], int] = _none_here
    """(world size, section `spark`) -> how many of the ranks run on this machine and share its cores."""
    starts_again: bool = True
    """Whether it can start fewer ranks after some were lost (`train.max_restarts`)."""
    assigns_devices: Callable[[SparkConfig], bool] = _assigns_none
    """(section `spark`) -> whether what starts the ranks gives them devices, so that this machine's do not count."""
    in_this_process: bool = False
    """The one rank runs in the process of the command."""
    started_by_others: bool = False
    """The processes exist already: each of them runs this command (torchrun, SLURM, MPI, Kubernetes)."""
    chooses_nics: bool = False
    """It passes all of `train.nics` to its ranks on every host, even if no rank runs here."""
    starts_helpers: bool = True
    """It can start more processes than the loop uses: the workers and servers of a strategy with a chief."""
    outlives_ranks: bool = False
    """Its job continues without a lost rank, if the strategy does (`Strategy.may_lose`)."""


LAUNCHERS: Registry[Launcher] = Registry(
    "train.launcher",
    {
        "inline": Entry("train.launching.inline:INLINE", "this process, one rank"),
        "local": Entry(
            "train.launching.local:LOCAL",
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
    point=ExtensionPoint("how ranks start", "train.launching:Launcher"),
)


def is_on_spark(launcher: str) -> bool:
    """Whether its ranks are Spark tasks; found without loading it."""
    return "pyspark" in LAUNCHERS.entry(launcher).packages


def launcher_of(config: TrainConfig) -> Launcher | None:
    """Return the launcher that `train.launcher` names; None if it is `auto`."""
    return None if config.launcher == "auto" else LAUNCHERS[config.launcher]
