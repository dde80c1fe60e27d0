"""Measures what it costs a training to time the parts of every step, which it always does.

    .venv/bin/python benchmarks/timing_cost.py

A training runs as usual, but a clock stands around everything that only serves the times: on a rank the laps of its
stopwatch, their sums, the reader's times and the report of a step; in the driver what the verdict and the warning of
stragglers make of it. That clock's own cost is counted, too: the figure is an upper bound.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.results import hardware
from benchmarks.training_start import build_dataset
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.loader.reader import BatchReader
from train.config import TrainConfig
from train.contracts.activities import Activity, Stopwatch
from train.contracts.task import WorkerTask
from train.contracts.values import Progress, Reporter, StepReport, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.rank import worker
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import StragglerWatch
from train.reporting.verdict import StepTimes

STRATEGIES = ("horovod", "torch_ddp")
# The first steps trace and warm up.
FIRST_STEP = 10


class Clock:
    """Seconds in the functions that it stands around."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - started

        return timed


class PerStep:
    """A reporter that also tells how much of each step went into its times."""

    def __init__(self, reporter: Reporter, clock: Clock) -> None:
        self._reporter, self._clock = reporter, clock
        self._last = time.perf_counter()

    def step(self, report: StepReport) -> None:
        now = time.perf_counter()
        self._reporter.event("timed", {"step_seconds": now - self._last, "timing_seconds": self._clock.seconds})
        self._last, self._clock.seconds = now, 0.0
        self._reporter.step(report)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._reporter.event(name, fields)

    def doing(self, activity: Activity) -> Activity:
        return self._reporter.doing(activity)


def timed_worker(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """What the ranks run."""
    clock = Clock()
    for holder, name in (
        (Stopwatch, "lap"), (Progress, "after_time"), (Progress, "after_step"), (BatchReader, "take_seconds"),
        (BatchReader, "_count"), (worker, "step_report"),
    ):  # fmt: skip
        setattr(holder, name, clock.around(getattr(holder, name)))
    return worker.run_worker(task, world, PerStep(reporter, clock))


class Driver:
    """An observer that keeps rank 0's figures, and times what a driver makes of a step."""

    def __init__(self) -> None:
        self.step_seconds: list[float] = []
        self.rank_seconds: list[float] = []
        self.driver_seconds: list[float] = []
        self._sinks = (StepTimes(), StragglerWatch(lambda name, fields: None, "slow"))

    def step(self, step: GlobalStep) -> None:
        started = time.perf_counter()
        for sink in self._sinks:
            sink.step(step)
        self.driver_seconds.append(time.perf_counter() - started)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "timed" and fields["rank"] == 0:
            self.step_seconds.append(float(fields["step_seconds"]))
            self.rank_seconds.append(float(fields["timing_seconds"]))


def measure(strategy: str, dataset_uri: str, models_uri: str) -> str:
    """One row of a table."""
    config = TrainConfig(
        launcher="local", strategy=strategy, num_workers=2, global_batch_size=24, epochs=20, checkpoint_every_steps=0
    )
    task = WorkerTask(config, open_dataset(dataset_uri).pin, models_uri, "trainings/timed", "")
    seen = Driver()
    LAUNCHERS["local"].launch(task, SparkConfig(), seen, worker="benchmarks.timing_cost:timed_worker")
    columns = (seen.step_seconds, seen.rank_seconds, seen.driver_seconds)
    step, of_rank, of_driver = (statistics.median(each[FIRST_STEP:]) for each in columns)
    return (
        f"| `{strategy}` | {1e3 * step:.1f} ms | {1e6 * of_rank:.0f} us | {1e6 * of_driver:.0f} us | "
        f"{100 * (of_rank + of_driver) / step:.2f} % |"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-timing-") as folder:
        dataset_uri = build_dataset(Path(folder))
        sys.stdout.write(f"{hardware()}; 2 ranks of 12 images of 32x32; medians of the steps\n\n")
        sys.stdout.write("| | a step | its times: rank | driver | share of a step |\n|---|---|---|---|---|\n")
        for strategy in STRATEGIES:
            sys.stdout.write(measure(strategy, dataset_uri, f"{folder}/models-{strategy}") + "\n")


if __name__ == "__main__":
    main()
