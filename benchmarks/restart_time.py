"""Measures how long a training takes to continue after a rank is killed, and what the watchdog costs if none is.

    .venv/bin/python benchmarks/restart_time.py restart --rounds 3
    .venv/bin/python benchmarks/restart_time.py watchdog --strategy torch_ddp

`restart`: two ranks here, `train.max_restarts = 1`; rank 1 is killed with SIGKILL in the middle, and the time goes on
until the driver names it, and from there until the first step of the next attempt, which has one rank. `watchdog`: in
every other block of steps each rank sends heartbeats as fast as it can, up to hundreds a second instead of one; what a
block costs more, in the ranks and in the driver, is divided by their number.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import hardware
from benchmarks.training_start import build_dataset
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig, SparkConfig
from shardmill.jobs.observer import FieldValue
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepReport, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.launching.rank import HEARTBEAT_SECONDS
from train.rank.worker import run_worker
from train.reporting.observer import GlobalStep
from train.training import train_model
from train.tree import TrainTree

STRATEGIES = ("horovod", "torch_ddp")
KILL_AFTER = 6
BLOCK_STEPS, NUM_BLOCKS = 20, 16
PAUSE_SECONDS = 0.002


@dataclass
class Killer:
    """An observer that kills rank 1 once, behind some steps, and remembers what happens when."""

    pids: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0
    killed: float = 0.0
    found: float = 0.0
    started: float = 0.0
    """The next attempt's process."""
    first_step: float = 0.0

    def step(self, step: GlobalStep) -> None:
        self.num_steps += 1
        if self.found:
            self.first_step = self.first_step or time.monotonic()
        elif self.num_steps == KILL_AFTER:
            os.kill(self.pids[1], signal.SIGKILL)
            self.killed = time.monotonic()

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "rank_started":
            self.pids[int(str(fields["rank"]))] = int(str(fields["pid"]))
            self.started = time.monotonic()
        if name == "rank_failed":
            self.found = time.monotonic()


def measure_restart(strategy: str, dataset_uri: str, models_uri: str) -> dict[str, float]:
    """Seconds of one training that loses a rank."""
    config = TrainConfig(
        launcher="local", strategy=strategy, num_workers=2, epochs=4, max_restarts=1, checkpoint_every_steps=2
    )
    tree = TrainTree(
        dataset=DatasetConfig(uri=dataset_uri), models=ModelsConfig(uri=models_uri), train=config, spark=SparkConfig()
    )
    seen = Killer()
    outcome = train_model(tree, seen)
    assert len(outcome.restarts) == 1, outcome
    return {
        "killed -> named": seen.found - seen.killed,
        "named -> new process": seen.started - seen.found,
        "new process -> step": seen.first_step - seen.started,
        "killed -> step": seen.first_step - seen.killed,
    }


class Beating:
    """A reporter that beats much faster in every other block of steps, and counts its process's CPU time of each."""

    def __init__(self, reporter: Any) -> None:
        """`reporter`: `train.launching.rank.DriverReporter`, of the module that runs as `__main__`."""
        self._reporter = reporter
        self._beats = threading.Event()
        self._num_beats = self._num_steps = 0
        self._cpu_seconds = time.process_time()
        threading.Thread(target=self._beat, daemon=True).start()

    def step(self, report: StepReport) -> None:
        self._reporter.step(report)
        self._num_steps += 1
        if self._num_steps % BLOCK_STEPS == 0:
            now = time.process_time()
            self._reporter.event("block", {"cpu": now - self._cpu_seconds, "beats": self._num_beats})
            self._num_beats, self._cpu_seconds = 0, now
            (self._beats.clear if self._beats.is_set() else self._beats.set)()

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._reporter.event(name, fields)

    def doing(self, activity: Activity) -> Activity:
        return self._reporter.doing(activity)

    def _beat(self) -> None:
        while self._beats.wait():
            self._reporter._connection.send(self._reporter.heartbeat)
            self._num_beats += 1
            time.sleep(PAUSE_SECONDS)


def beating_worker(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """What the ranks of `watchdog` run."""
    return run_worker(task, world, Beating(reporter))


@dataclass(frozen=True)
class Block:
    """What a rank's process spent on some steps."""

    cpu_seconds: float
    num_beats: int


@dataclass
class Blocks:
    """An observer of blocks: those of each rank, and the CPU seconds of this process meanwhile."""

    ranks: dict[int, list[Block]] = field(default_factory=dict)
    driver: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.process_time)

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "block":
            rank, cpu_seconds, num_beats = (float(str(fields[key])) for key in ("rank", "cpu", "beats"))
            self.ranks.setdefault(int(rank), []).append(Block(cpu_seconds, int(num_beats)))
            if rank == 0:
                now = time.process_time()
                self.driver.append(now - self.last)
                self.last = now


def measure_watchdog(strategy: str, dataset_uri: str, models_uri: str) -> str:
    """One row of a table: CPU time of a step, and of a heartbeat in the rank and in the driver."""
    config = TrainConfig(
        launcher="local",
        strategy=strategy,
        num_workers=2,
        global_batch_size=24,
        epochs=NUM_BLOCKS * BLOCK_STEPS // 10,
        checkpoint_every_steps=0,
    )
    task = WorkerTask(config, open_dataset(dataset_uri).pin, models_uri, "trainings/beats", "")
    seen = Blocks()
    LAUNCHERS["local"].launch(task, SparkConfig(), seen, worker="benchmarks.restart_time:beating_worker")
    blocks, num_pairs = seen.ranks, min(map(len, seen.ranks.values())) // 2
    of_step, of_rank, of_driver, num_beats = [], [], [], []
    # The first pair traces and warms up. In each the second block is the fast one.
    for slow in range(2, 2 * num_pairs, 2):
        fast = slow + 1
        beats = sum(blocks[rank][fast].num_beats for rank in blocks)
        of_step.append(blocks[0][slow].cpu_seconds / BLOCK_STEPS)
        of_rank.append(sum(blocks[rank][fast].cpu_seconds - blocks[rank][slow].cpu_seconds for rank in blocks) / beats)
        of_driver.append((seen.driver[fast] - seen.driver[slow]) / beats)
        num_beats.append(beats)
    step_ms = 1e3 * statistics.median(of_step)
    rank_us, driver_us = (1e6 * statistics.median(each) for each in (of_rank, of_driver))
    share = (rank_us + driver_us) / 1e6 / HEARTBEAT_SECONDS
    return (
        f"| `{strategy}` | {step_ms:.1f} ms | {rank_us:.0f} us | {driver_us:.0f} us | {100 * share:.3f} % | "
        f"{len(of_step)} pairs, {statistics.median(num_beats):.0f} heartbeats in each |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("restart", "watchdog"))
    parser.add_argument("--strategy", choices=STRATEGIES, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    strategies = given.strategy or STRATEGIES
    with tempfile.TemporaryDirectory(prefix="shardmill-restart-") as folder:
        dataset_uri = build_dataset(Path(folder))
        sys.stdout.write(f"{hardware()}; load {os.getloadavg()[0]:.1f}\n\n")
        if given.what == "watchdog":
            sys.stdout.write(
                "| | CPU of a step | of a heartbeat: rank | driver | share of a core at 1/s | measured |\n"
            )
            sys.stdout.write("|---|---|---|---|---|---|\n")
            for strategy in strategies:
                sys.stdout.write(measure_watchdog(strategy, dataset_uri, f"{folder}/models-{strategy}") + "\n")
            return
        found: dict[str, list[dict[str, float]]] = {each: [] for each in strategies}
        for number in range(given.rounds):
            for strategy in strategies:
                found[strategy].append(measure_restart(strategy, dataset_uri, f"{folder}/models-{number}-{strategy}"))
        for strategy, rounds in found.items():
            for name in rounds[0]:
                each = [one[name] for one in rounds]
                values = " ".join(f"{one:.2f}" for one in each)
                sys.stdout.write(f"{strategy:10s} {name:22s} {statistics.median(each):6.2f} s (rounds: {values})\n")


if __name__ == "__main__":
    main()
