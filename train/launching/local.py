"""The launcher of processes on this machine: one for each rank, over the loopback interface."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import python_path
from train.launching import Launcher
from train.launching.keeper import RankProcess
from train.launching.rank import DEFAULT_WORKER
from train.launching.rendezvous import GLOO_TIMEOUT_SECONDS, LOOPBACK, GuardedRendezvous, address_variables
from train.launching.watchdog import Watchdog
from train.observer import TrainObserver
from train.task import WorkerTask
from train.values import TrainResult

# Ranks end by themselves when they have finished; native libraries may take this long to shut down.
EXIT_SECONDS = 5.0


def launch_local(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run every rank as a process here. Raises the first failing rank's own error."""
    world_size = task.config.num_workers
    with (
        _rendezvous(world_size) as gloo,
        Watchdog(task, worker, observer, LOOPBACK) as watchdog,
        _processes(
            [_rank_environment(rank, world_size, gloo | watchdog.environment()) for rank in range(world_size)]
        ) as processes,
    ):
        for rank, process in enumerate(processes):
            threading.Thread(target=_report_exit, args=(watchdog, rank, process), daemon=True).start()
        return watchdog.watch()


@contextmanager
def _processes(environments: list[dict[str, str]]) -> Iterator[list[RankProcess]]:
    """Started on entry; none is left on exit, however that comes."""
    processes: list[RankProcess] = []
    try:
        for environment in environments:
            processes.append(RankProcess(environment))
        yield processes
        deadline_seconds = time.monotonic() + EXIT_SECONDS
        while any(process.is_running() for process in processes) and time.monotonic() < deadline_seconds:
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _report_exit(watchdog: Watchdog, rank: int, process: RankProcess) -> None:
    watchdog.report_exit(rank, process.wait())


def _rank_environment(rank: int, world_size: int, more: dict[str, str]) -> dict[str, str]:
    place = {
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": world_size,
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": world_size,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
        "HOROVOD_HOSTNAME": LOOPBACK,
    }
    return {**os.environ, "PYTHONPATH": python_path(), **{key: str(value) for key, value in place.items()}, **more}


@contextmanager
def _rendezvous(world_size: int) -> Iterator[dict[str, str]]:
    """Where Gloo's processes find each other."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts

    path = secrets.token_hex(32)
    server = GuardedRendezvous(LOOPBACK, path)
    try:
        server.init(get_host_assignments(parse_hosts(f"{LOOPBACK}:{world_size}"), world_size))
        port = server.start()
        yield {
            **address_variables(LOOPBACK, port, path),
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_GLOO_TIMEOUT_SECONDS": str(GLOO_TIMEOUT_SECONDS),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    finally:
        server.stop()


LOCAL = Launcher(launch_local, ranks_here=lambda world_size, spark: world_size)
