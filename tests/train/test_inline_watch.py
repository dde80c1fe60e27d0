"""A rank in the command's own process that stands still is told of and ended, unless somebody is debugging it."""

from __future__ import annotations

import bdb
import signal
import subprocess
import sys
import threading
import time

import pytest

from shardmill.errors import TrainingError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import WARNING
from tests.train.driver_process import PIN, WORKERS
from tests.train.test_job import Recorder
from train.config import TrainConfig
from train.contracts.activities import Activity, during
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepReport, TrainResult
from train.contracts.world import World
from train.launching.inline import launch_inline
from train.settings.watch import WatchConfig

SECONDS = {"silent_seconds": 0.5, "progress_timeout_seconds": 1.0, "start_timeout_seconds": 0.5}
HERE = "tests.train.test_inline_watch"
# The start has its time: what has to stand still is a read.
PATIENT_START = {
    "watch": {**SECONDS, "start_timeout_seconds": 60},
    "strategy": "single",
    "launcher": "inline",
    "epochs": 2,
}
# Of a program that ends by its watch; a process that imports, on a busy machine.
_HANG_SECONDS = 120


def task() -> WorkerTask:
    watch = WatchConfig(**SECONDS)
    config = TrainConfig(num_workers=1, strategy="single", launcher="inline", watch=watch)
    return WorkerTask(config, PIN, "/nowhere", "t", "")


def holds_on(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Stands still where no signal reaches it."""
    reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    threading.Event().wait(600)
    raise AssertionError


def is_looked_at(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """As at a breakpoint: a debugger's own code waits for a person."""
    reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))
    bdb.Bdb.runcall(bdb.Bdb(), time.sleep, 3 * SECONDS["progress_timeout_seconds"])
    raise InterruptedError("nobody ended it")


def test_a_hanging_rank_is_reported_and_ended():
    recorder, handler = Recorder(), signal.getsignal(signal.SIGUSR2)
    with pytest.raises(TrainingError, match="rank 0 .* hangs after step 0 of epoch 0: no progress for"):
        launch_inline(task(), SparkConfig(), recorder, worker=f"{WORKERS}:sleeps")
    assert "has made no progress for" in recorder.fields["rank_paused"][WARNING]
    assert signal.getsignal(signal.SIGUSR2) is handler


def sleeps_in_a_step(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """After many of them."""
    for _ in range(30):
        with during(reporter, Activity("a step", repeats=True)):
            reporter.step(StepReport(0, 0, 0, 9, (0.5).hex()))
    reporter.doing(Activity("a step", repeats=True))
    time.sleep(600)
    raise AssertionError


def test_a_step_that_sleeps_is_ended_by_what_steps_took():
    config = TrainConfig(num_workers=1, strategy="single", launcher="inline", watch=WatchConfig(silent_seconds=0.5))
    with pytest.raises(TrainingError, match="rank 0 .* hangs .*silent_seconds = 0.5, the longest .* in a step"):
        launch_inline(
            WorkerTask(config, PIN, "/nowhere", "t", ""), SparkConfig(), Recorder(), f"{HERE}:sleeps_in_a_step"
        )


def test_one_that_no_signal_reaches_takes_the_process_with_it():
    command = [sys.executable, "-m", "tests.programs.rank_that_no_signal_reaches"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5
    assert "in holds_on" in ended.stderr and ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 ")


def test_a_read_without_an_answer_takes_the_process_with_it(tiny_uri, tmp_path):
    """The reader's threads are not waited for: they would hold the end up for as long as the storage is silent."""
    command = [sys.executable, "-m", "tests.programs.rank_that_gets_no_answer", tiny_uri, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_HANG_SECONDS, check=False)
    assert ended.returncode == 5, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("ERROR 5: rank 0 (")
    assert "hangs after step" in ended.stderr.splitlines()[-1]


def test_a_person_at_a_breakpoint_may_take_as_long_as_they_like():
    recorder = Recorder()
    with pytest.raises(TrainingError, match="nobody ended it"):
        launch_inline(task(), SparkConfig(), recorder, worker=f"{HERE}:is_looked_at")
    assert "rank_paused" not in recorder.events


def test_in_another_thread_nothing_is_watched():
    found: list[BaseException] = []

    def launch() -> None:
        try:
            launch_inline(task(), SparkConfig(), Recorder(), worker=f"{HERE}:is_looked_at")
        except TrainingError as error:
            found.append(error)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join(_HANG_SECONDS)
    assert "nobody ended it" in str(found[0])
