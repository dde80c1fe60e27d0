"""Ranks in the driver's own process that stand still, and the clock of the watch that ends them."""

from __future__ import annotations

import bdb
import signal
import threading
import time
from functools import partial
from unittest.mock import patch

from shardmill.jobs.config import SparkConfig
from tests.train.driver_process import PIN
from train.config import TrainConfig
from train.contracts.activities import Activity, during
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepReport, TrainResult
from train.contracts.world import World
from train.launching import inline
from train.reporting.observer import TrainObserver
from train.settings import WatchConfig

HERE = "tests.train.inline_workers"
LIMITS = {"silent_seconds": 30, "progress_timeout_seconds": 60, "start_timeout_seconds": 60}


class Clock:
    """Stands until the rank stands still; then it is 2 seconds later each time that the watch looks at it."""

    def __init__(self) -> None:
        self.seconds, self.runs = 0.0, threading.Event()
        self.is_late = threading.Event()
        """Long after every limit."""

    def __call__(self) -> float:
        if self.runs.is_set() and threading.current_thread().name == "inline-watch":
            self.seconds += 2
        if self.seconds > 10 * LIMITS["progress_timeout_seconds"]:
            self.is_late.set()
        return self.seconds


CLOCK = Clock()


def launch_watched(task: WorkerTask, observer: TrainObserver, worker: str) -> TrainResult:
    """As the launcher `inline` does, by that clock."""
    watch = partial(inline.InlineWatch, now=CLOCK)
    with patch.object(inline, "InlineWatch", watch), patch.object(inline, "TICK_SECONDS", 0.02):
        CLOCK.runs.clear()
        return inline.launch_inline(task, SparkConfig(), observer, worker)


def inline_task(**watch: float) -> WorkerTask:
    config = TrainConfig(num_workers=1, strategy="single", launcher="inline", watch=WatchConfig(**{**LIMITS, **watch}))
    return WorkerTask(config, PIN, "/nowhere", "t", "")


def stands_still(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))
    CLOCK.runs.set()
    time.sleep(600)
    raise AssertionError


def holds_on(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Stands still where no signal reaches it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    return stands_still(task, world, reporter)


def sleeps_in_a_step(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """After many of them."""
    for _ in range(30):
        with during(reporter, Activity("a step", repeats=True)):
            reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))
    reporter.doing(Activity("a step", repeats=True))
    CLOCK.runs.set()
    time.sleep(600)
    raise AssertionError


def is_looked_at(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """As at a breakpoint: a debugger's own code waits for a person."""
    reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))

    def look() -> None:
        CLOCK.runs.set()
        CLOCK.is_late.wait(600)

    bdb.Bdb.runcall(bdb.Bdb(), look)
    raise InterruptedError("nobody ended it")


def reports_threads(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    raise InterruptedError(f"threads: {[thread.name for thread in threading.enumerate()]}")
