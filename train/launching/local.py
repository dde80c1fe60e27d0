"""The launcher of processes on this machine: one per rank, over the loopback interface."""

from __future__ import annotations

import os

from shardmill.environments.place import Place
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import python_path
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.contracts.world import LOOPBACK
from train.launching import Launcher
from train.launching.agent import rank_processes
from train.launching.devices import device_environment
from train.launching.rank import DEFAULT_WORKER
from train.launching.watchdog import Watchdog
from train.reporting.observer import TrainObserver
from train.strategies import roles_of


def launch_local(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run every rank as a process here. Raises the first failing rank's own error."""
    world_size = len(roles_of(task.config))
    with Watchdog(task, worker, observer, LOOPBACK) as watchdog:
        shared = {**os.environ, "PYTHONPATH": python_path(), **watchdog.environment()}
        places = [Place(rank, world_size, local_rank=rank, ranks_per_node=world_size) for rank in range(world_size)]
        own = [place.environment() | device_environment(place, task.config) for place in places]
        environments = {rank: shared | each for rank, each in enumerate(own)}
        with rank_processes(environments, watchdog.report_output, watchdog.report_exit):
            return watchdog.watch()


LOCAL = Launcher(launch_local, ranks_here=lambda world_size, spark: world_size, outlives_ranks=True)
