"""The launcher of Spark's barrier stages: all tasks start together, and each starts a rank's process on its executor.

It knows no strategy: ranks meet through their driver. Driver and executors share nothing but the network.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from shardmill.applications import OnExecutor
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.open_spark import open_spark
from shardmill.jobs.process import SAFE_PATH, python_path
from shardmill.jobs.spark_tasks import Tasks
from train.api import Launcher
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.launching.processes import keep_rank
from train.launching.rank import DEFAULT_WORKER
from train.launching.spark_slots import (
    SparkJob,
    assigns_gpus,
    check_configured_slots,
    driver_addresses,
    ranks_on_this_machine,
    text_of,
    wait_for_slots,
)
from train.launching.watchdog import Watchdog
from train.reporting.observer import TrainObserver
from train.strategies import roles_of

APPLICATION_NAME = "shardmill-train"


def launch_spark_barrier(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run every rank in a Spark task. Raises UsageError at once if Spark cannot run them all at the same time."""
    world_size = len(roles_of(task.config))
    check_barrier(world_size, spark)
    with open_spark(APPLICATION_NAME, spark, spark.train.conf) as cluster:
        check_no_dynamic_allocation(cluster.settings)
        wait_for_slots(world_size, cluster, task.config.watch.start_timeout_seconds)
        with Watchdog(task, worker, observer, *driver_addresses(cluster)) as watchdog:
            run_rank = OnExecutor(partial(_run_rank, watchdog.environment()))
            job = cluster.start(Tasks(run_rank, {"exit_code": "bigint"}, world_size, are_together=True))
            return SparkJob(
                "Spark's barrier stage",
                job.result,
                job.cancel,
                watchdog,
                # Without Java's stack trace.
                text=lambda error: text_of(error).split(" at ")[0],
            ).watch()


def check_barrier(world_size: int, spark: SparkConfig) -> None:
    """Check the config: slots for all ranks, and no dynamic allocation. Raises UsageError."""
    check_configured_slots(world_size, spark)
    check_no_dynamic_allocation(spark.train.conf)


def check_no_dynamic_allocation(conf: Mapping[str, str]) -> None:
    """Spark refuses barrier stages with it, but late and in its own words. Raises UsageError."""
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        raise UsageError(
            "train.launcher = 'spark_barrier' with spark.dynamicAllocation.enabled = true",
            "Spark runs no barrier stage with dynamic allocation, because all ranks must run at the same time",
            "set spark.dynamicAllocation.enabled = false and spark.executor.instances for the training",
        )


def _run_rank(environment: Mapping[str, str], _: Iterable[bytes]) -> Iterator[tuple[int]]:
    """What Spark runs in each task. What it carries is a secret, as everything in Spark's own tasks."""
    from pyspark import BarrierTaskContext

    context: Any = BarrierTaskContext.get()
    rank = context.partitionId()
    hosts = [each.address.rpartition(":")[0] or each.address for each in context.getTaskInfos()]
    place = RankEnvironment(rank, len(hosts), hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank]))
    # What Spark added to this process's path is not in its environment.
    # A rank's failure is its driver's to judge: a task that fails would be tried again by Spark.
    environment_here = {**os.environ, "PYTHONPATH": python_path(), **SAFE_PATH, **environment}
    gpus = context.resources().get("gpu")
    yield (keep_rank(place, environment_here, gpus.addresses if gpus else None),)


SPARK_BARRIER = Launcher(
    launch_spark_barrier, check=check_barrier, ranks_here=ranks_on_this_machine, assigns_devices=assigns_gpus
)
