"""What the ranks of test_multi_rank.py run: the real worker, with a real death or a last word added."""

from __future__ import annotations

import os
import signal
import time

from shardmill.stores import open_store
from train.task import WorkerTask
from train.values import Reporter, StepReport, TrainResult, World
from train.worker import run_worker

KILL_AT = "SHARDMILL_TEST_KILL_AT_STEP"


class DyingReporter:
    """Reports, but kills its process instead of reporting the global step that the environment names."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def step(self, report: StepReport) -> None:
        if report.epoch * report.num_steps + report.step == int(os.environ[KILL_AT]):
            os.kill(os.getpid(), signal.SIGKILL)
        self._reporter.step(report)

    def event(self, name: str, fields: dict[str, str | int | float]) -> None:
        self._reporter.event(name, fields)

    def doing(self, what: str, *, waits: bool = False) -> None:
        self._reporter.doing(what, waits=waits)


class StallingReporter(DyingReporter):
    """Reports, but stands still instead of reporting the third step."""

    def step(self, report: StepReport) -> None:
        if report.step == 2:
            time.sleep(600)
        self._reporter.step(report)


def last_rank_stalls(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    stalls = world.rank == world.world_size - 1
    return run_worker(task, world, StallingReporter(reporter) if stalls else reporter)


def last_rank_dies(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    dies = world.rank == world.world_size - 1
    return run_worker(task, world, DyingReporter(reporter) if dies else reporter)


def every_rank_tells_its_weights(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    result = run_worker(task, world, reporter)
    open_store(task.models_uri).put(f"told/rank-{world.rank}", result.weights_sha256.encode())
    return result
