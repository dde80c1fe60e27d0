"""Finds what Spark offers to ranks: how many run at the same time (estimated before it starts, then measured), and
the addresses of the driver; and runs their tasks beside the main thread.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig, is_local_master, is_on_this_machine, is_under_spark_submit
from train.contracts.world import LOOPBACK
from train.launching.rank_failures import FIX

if TYPE_CHECKING:
    from shardmill.jobs.spark_tasks import SparkTasks
    from train.contracts.values import TrainResult
    from train.launching.watchdog import Watchdog


GPUS_OF_TASK, GPUS_OF_EXECUTOR = "spark.task.resource.gpu.amount", "spark.executor.resource.gpu.amount"
# All settings of Spark that this module looks at.
SLOT_SETTINGS = (
    GPUS_OF_TASK, GPUS_OF_EXECUTOR, "spark.task.cpus", "spark.cores.max", "spark.executor.instances",
    "spark.executor.cores", "spark.dynamicAllocation.enabled",
)  # fmt: skip
# Spark's defaults on YARN and Kubernetes; spark-defaults.conf may change them.
_DEFAULTS = {"spark.executor.instances": "2", "spark.executor.cores": "1"}
# A standalone master hands out at once all that it has; how far apart two executors start, on a busy machine.
SETTLED_SECONDS = 15.0
_POLL_SECONDS = 0.2


def check_configured_slots(world_size: int, spark: SparkConfig) -> None:
    """`check_slots` for the section `spark`, before Spark is asked; `spark-submit` has told all that holds."""
    check_slots(world_size, spark.master, spark.train.conf, is_all=is_under_spark_submit())


def ranks_on_this_machine(world_size: int, spark: SparkConfig) -> int:
    """All of them or none."""
    return world_size if is_on_this_machine(spark.master) else 0


def assigns_gpus(spark: SparkConfig) -> bool:
    """Whether Spark gives each task its own GPUs."""
    return GPUS_OF_TASK in spark.train.conf


def check_slots(world_size: int, master: str, conf: Mapping[str, str], *, is_all: bool) -> None:
    """Raises UsageError with the numbers if fewer than `world_size` tasks can run at once, as far as that is known.

    Spark would start as many as fit and wait forever with the rest. `is_all`: as in `num_slots_of`.
    """
    num_slots = num_slots_of(master, conf, is_all=is_all)
    if num_slots is not None and num_slots < world_size:
        raise UsageError(*_too_few(world_size, master, f"runs {num_slots} task(s) at a time"))


def wait_for_slots(world_size: int, cluster: SparkTasks, timeout_seconds: float) -> None:
    """Return when `world_size` tasks can run at once on the executors that are there.

    Raises UsageError with the numbers if they never can, at once on YARN and Kubernetes, in seconds on a standalone
    cluster; TrainingError if executors that were asked for are not there in time. Spark would wait with the first ranks
    in its slots, and looks whether a barrier stage fits only every 15 s.
    """
    master, conf = cluster.master, cluster.settings
    check_slots(world_size, master, conf, is_all=True)
    # With dynamic allocation executors come for tasks that wait.
    if is_local_master(master) or not _keeps_executors(conf):
        return
    started_seconds = since_seconds = time.monotonic()
    last = 0
    # Spark Connect does not tell: there the ranks have until the time to start is over.
    while (num_slots := cluster.num_slots()) is not None and num_slots < world_size:
        now = time.monotonic()
        if num_slots != last:
            last, since_seconds = num_slots, now
        if num_slots and master.startswith("spark://") and now - since_seconds > SETTLED_SECONDS:
            raise UsageError(*_too_few(world_size, master, f"has {num_slots} slot(s) for it"))
        if now - started_seconds > timeout_seconds:
            has = f"has {num_slots} slot(s) for it after train.watch.start_timeout_seconds = {timeout_seconds:g}"
            raise TrainingError(*_too_few(world_size, master, has))
        time.sleep(_POLL_SECONDS)


def _too_few(world_size: int, master: str, has: str) -> tuple[str, str, str]:
    """An error's three parts."""
    if is_on_this_machine(master):
        fix = f'set spark.master = "local[{world_size}]"'
    else:
        named = " (spark.executor.instances, spark.executor.cores)" if _has_defaults(master) else ""
        fix = f"ask for more executors or cores{named}, or set train.num_workers lower"
    return (
        f"a training of {world_size} ranks, but Spark at {master!r} {has}",
        f"expected at least {world_size} slots: each rank is a Spark task, and all must run at once",
        fix,
    )


def num_slots_of(master: str, conf: Mapping[str, str], *, is_all: bool = False) -> int | None:
    """Tasks that can run at the same time, or None if that is not known yet (dynamic allocation, a standalone master).

    `is_all`: `conf` is all that Spark has been given, so that its own defaults hold for the rest.
    """
    cpus_per_task = _number(conf, "spark.task.cpus", "1")

    def slots_of_executor(cores: int) -> int:
        by_cores, gpus = cores // cpus_per_task, conf.get(GPUS_OF_EXECUTOR)
        # A share of a GPU (0.5) means that two tasks get the same one, which ranks refuse.
        return (
            by_cores
            if gpus is None
            else min(by_cores, int(_number(conf, GPUS_OF_EXECUTOR) / float(conf.get(GPUS_OF_TASK, "1"))))
        )

    if master == "local":
        return 1 // cpus_per_task
    if threads := re.fullmatch(r"local\[(\d+|\*)(?:,\d+)?\]", master):
        num_cpus = os.cpu_count() or 1 if threads[1] == "*" else int(threads[1])
        return num_cpus // cpus_per_task
    if cluster := re.fullmatch(r"local-cluster\[(\d+),(\d+),\d+\]", master):
        return int(cluster[1]) * slots_of_executor(int(cluster[2]))
    if master.startswith("spark://"):
        # It gives cores, as many as there are, and knows no number of executors.
        most = conf.get("spark.cores.max")
        return None if most is None else _number(conf, "spark.cores.max") // cpus_per_task
    if is_all and _has_defaults(master):
        conf = _DEFAULTS | dict(conf)
    if _keeps_executors(conf) and "spark.executor.instances" in conf and "spark.executor.cores" in conf:
        return _number(conf, "spark.executor.instances") * slots_of_executor(_number(conf, "spark.executor.cores"))
    return None


def num_rank_slots(master: str, conf: Mapping[str, str]) -> int | None:
    """Ranks that a cluster has room for: one for each GPU that it assigns, else one for each executor, which gives it
    all its cores. None if the settings do not say; a local master is not a cluster.
    """
    if is_local_master(master):
        return None
    if GPUS_OF_TASK in conf:
        return num_slots_of(master, conf)
    if cluster := re.fullmatch(r"local-cluster\[(\d+),\d+,\d+\]", master):
        return int(cluster[1])
    if master.startswith("spark://"):
        has_both = "spark.cores.max" in conf and "spark.executor.cores" in conf
        return _number(conf, "spark.cores.max") // _number(conf, "spark.executor.cores") if has_both else None
    is_told = _keeps_executors(conf) and "spark.executor.instances" in conf
    return _number(conf, "spark.executor.instances") if is_told else None


def rank_slots_problem(master: str, conf: Mapping[str, str]) -> str | None:
    """Explain why `num_rank_slots` returns no number above 0, and which settings would change it; None if it does."""
    if is_local_master(master) or (num_slots := num_rank_slots(master, conf)):
        return None
    if num_slots == 0:
        return f"by its settings {master} has no slot for a rank"
    if not master.startswith("spark://") and not _keeps_executors(conf):
        fix = "set spark.dynamicAllocation.enabled = false and spark.executor.instances"
        return f"{master} adds and removes executors, which ranks cannot use ({fix})"
    has_gpus = GPUS_OF_TASK in conf
    if master.startswith("spark://"):
        needed = ("spark.cores.max",) if has_gpus else ("spark.cores.max", "spark.executor.cores")
    else:
        needed = ("spark.executor.instances", "spark.executor.cores") if has_gpus else ("spark.executor.instances",)
    missing = " and ".join(name for name in needed if name not in conf)
    what = f"ranks {master} has GPUs for" if has_gpus else f"executors {master} has"
    return f"the settings do not show how many {what} ({missing}; or set train.num_workers)"


def _keeps_executors(conf: Mapping[str, str]) -> bool:
    """Whether their number stays what it was set to."""
    return conf.get("spark.dynamicAllocation.enabled", "false") == "false"


def _has_defaults(master: str) -> bool:
    """Whether Spark asks there for `_DEFAULTS`."""
    return master == "yarn" or master.startswith("k8s://")


def _number(conf: Mapping[str, str], name: str, default: str = "") -> int:
    """Raises UsageError unless it is a whole number above 0."""
    value = conf.get(name, default)
    if not re.fullmatch(r"0*[1-9]\d*", value):
        raise UsageError(f"{name} = {value!r}", "expected a whole number above 0", "correct it in the Spark settings")
    return int(value)


def text_of(error: BaseException) -> str:
    """One line of an exception that may be Java's."""
    try:
        return " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:
        # The text of a Java exception comes from the JVM, which may be gone.
        return type(error).__name__


# After the ranks have ended, Spark's tasks get so long to end as well (Horovod keeps each alive for 3 s at least).
FINISH_SECONDS = 30.0
CANCEL_SECONDS = 2.0


class SparkJob:
    """Spark's tasks of all ranks, run by a thread, so that the main thread is free to watch the ranks."""

    def __init__(
        self,
        what: str,
        run: Callable[[], object],
        cancel: Callable[[], object],
        watchdog: Watchdog,
        *,
        stop: Callable[[], None] = lambda: None,
        output: Callable[[], str] = lambda: "",
        text: Callable[[BaseException], str] | None = None,
    ) -> None:
        """`run` returns when the tasks have ended, and may raise anything, whose message is `text`. `cancel` has Spark
        end them; `stop` has `run` end early; `output`: the end of what the tasks have printed."""
        self._what, self._run, self._cancel_tasks, self._watchdog = what, run, cancel, watchdog
        self._stop, self._output, self._text = stop, output, text or text_of
        self._failure = ""
        self._thread = threading.Thread(target=self._work, name="spark-job", daemon=True)
        self._thread.start()

    def watch(self) -> TrainResult:
        """Rank 0's result, when all ranks have finished and the tasks have ended; of any failure nothing is left.

        Raises as `Watchdog.watch` does, and TrainingError if the tasks fail although all ranks finished.
        """
        try:
            result = self._watchdog.watch()
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive() or self._failure:
                what = self._failure or f"Spark's tasks still run {FINISH_SECONDS:g} s later"
                raise TrainingError(f"all ranks finished, but {self._what} did not: {what}", fix=FIX)
            return result
        except BaseException:
            # First the ranks, at once; then Spark, which needs its time to take tasks down.
            self._watchdog.abort()
            self._cancel()
            raise

    def _cancel(self) -> None:
        """End Spark's tasks in bounded time. The ranks have been aborted: most often that ends the tasks, too."""
        self._thread.join(CANCEL_SECONDS)
        if self._thread.is_alive():
            self._stop()
            canceller = threading.Thread(target=self._cancel_tasks, name="spark-cancel", daemon=True)
            canceller.start()
            canceller.join(CANCEL_SECONDS)
            self._thread.join(CANCEL_SECONDS)

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:
            # Spark and Horovod raise plain exceptions with texts; the main thread decides what they mean.
            self._failure = self._text(error)
            with suppress(Exception):
                self._watchdog.report_launcher_failure(f"{self._what} failed: {self._failure}", self._output())


def driver_addresses(cluster: SparkTasks) -> tuple[str, str]:
    """(the address to bind to, the address that executors connect to), by Spark's settings for its own ports."""
    if cluster.own_address:
        return cluster.own_address, cluster.own_address
    if is_on_this_machine(cluster.master):
        return LOOPBACK, LOOPBACK
    # The context sets it when it starts.
    advertised = cluster.settings["spark.driver.host"]
    return cluster.settings.get("spark.driver.bindAddress", advertised), advertised
