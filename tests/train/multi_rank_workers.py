"""What the ranks of test_multi_rank.py run: the real worker, with a real death or a last word added."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping

from shardmill.jobs.observer import FieldValue
from shardmill.stores import open_store
from train.task import WorkerTask
from train.values import Reporter, StepReport, TrainResult
from train.worker import run_worker
from train.world import World

KILL_AT = "SHARDMILL_TEST_KILL_AT_STEP"


class DyingReporter:
    """Reports, but kills its process instead of reporting the global step that the environment names.

    `7`: that step; `3:20 2:40`: step 20 of three ranks, step 40 of two, and of one rank none.
    """

    def __init__(self, reporter: Reporter, world_size: int = 1) -> None:
        self._reporter = reporter
        self._killed_at = -1
        for each in os.environ.get(KILL_AT, "").split():
            of_size, _, step = each.rpartition(":")
            if of_size in ("", str(world_size)):
                self._killed_at = int(step)

    def step(self, report: StepReport) -> None:
        if report.epoch * report.num_steps + report.step == self._killed_at:
            # The checkpoint that was begun is written first, so that it is known where the next attempt goes on.
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)
        self._reporter.step(report)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
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
    return run_worker(task, world, DyingReporter(reporter, world.world_size) if dies else reporter)


def every_rank_tells_its_weights(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    result = run_worker(task, world, reporter)
    open_store(task.models_uri).put(f"told/rank-{world.rank}", result.weights_sha256.encode())
    return result
