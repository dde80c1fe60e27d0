"""Compares `parameter_server`, `horovod`, and `horovod` with `train.rank_weights` if one machine of two is slow.

    .venv/bin/python benchmarks/slow_worker.py --rounds 3

What a machine computes is a sleep, so many milliseconds for each image, as if on a device of its own, and longer on
the slow one: on a few shared cores nothing else would tell two machines apart. Reading, a small model, exchange and
dispatch are real, and come on top. Every round trains with each of them once, in turn; what counts is the time between
an epoch's first and last step, so that neither start nor evaluation is in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.values import Batch
from tests.lab.datasets import make_dataset
from train.api import Build, Member, MemberStep
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter
from train.contracts.world import Role, World
from train.launching import LAUNCHERS
from train.reporting.observer import GlobalStep
from train.strategies import horovod, parameter_server

MILLISECONDS = "SHARDMILL_BENCHMARK_MILLISECONDS_PER_IMAGE"
"""Of each of the two machines, separated by a blank; to the ranks' processes."""
GLOBAL_BATCH_SIZE = 64
NUM_IMAGES = 1600


def compute(machine: int, weights_N: np.ndarray) -> None:
    """Take the time in which that machine computes these images; padding has weight 0."""
    time.sleep(float(os.environ[MILLISECONDS].split()[machine]) / 1000 * np.count_nonzero(weights_N))


def join_horovod(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """As `horovod`; a rank is a machine."""
    member: Any = horovod.HOROVOD.join(world, config, build, reporter)
    train_step = member.train_step

    def train_step_there(batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        compute(world.rank, batch.weights_N)
        return train_step(batch, global_weight, learning_rate)

    member.train_step = train_step_there
    return member


def serve(task: WorkerTask, world: World, reporter: Reporter) -> NoReturn:
    """As `parameter_server`; a worker is a machine, the server and the chief take no time of their own."""

    class ReaderThere(parameter_server.StepReader):
        def __call__(self, epoch: Any, step: Any) -> tuple[np.ndarray, ...]:
            rows = super().__call__(epoch, step)
            compute(world.rank - 1, rows[2])
            return rows

    if world.role is Role.WORKER:
        parameter_server.StepReader = ReaderThere
    parameter_server.serve(task, world, reporter)


HOROVOD = replace(horovod.HOROVOD, join=join_horovod)
PARAMETER_SERVER = replace(parameter_server.PARAMETER_SERVER, serve=serve)
CONTESTANTS: dict[str, dict[str, object]] = {
    "`horovod`": {"strategy": "benchmarks.slow_worker:HOROVOD"},
    "`horovod`, `rank_weights`": {"strategy": "benchmarks.slow_worker:HOROVOD"},
    "`parameter_server`": {"strategy": "benchmarks.slow_worker:PARAMETER_SERVER"},
}


class EpochTimes:
    """A driver's observer that adds up the time from each epoch's first step to its last, but for the first epoch."""

    def __init__(self) -> None:
        self._began: tuple[int, float] = (-1, 0.0)
        self._seconds: dict[int, tuple[int, float]] = {}

    def step(self, step: GlobalStep) -> None:
        now = time.perf_counter()
        if step.epoch != self._began[0]:
            self._began = step.epoch, now
        self._seconds[step.epoch] = step.step, now - self._began[1]

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        return

    def images_per_second(self) -> float:
        """The first epoch traces and fills caches."""
        others = [each for epoch, each in self._seconds.items() if epoch]
        return GLOBAL_BATCH_SIZE * sum(steps for steps, _ in others) / sum(seconds for _, seconds in others)


def images_per_second(settings: dict[str, object], dataset_uri: str, models_uri: str) -> float:
    config = TrainConfig.model_validate(
        {"launcher": "local", "num_workers": 2, "epochs": 3, "model": "small_cnn", "checkpoint_every_steps": 0,
         "global_batch_size": GLOBAL_BATCH_SIZE, "backend": "keras", **settings}
    )  # fmt: skip
    times = EpochTimes()
    task = WorkerTask(config, open_dataset(dataset_uri).pin, models_uri, "trainings/slow", "")
    LAUNCHERS["local"].launch(task, SparkConfig(), times)
    return times.images_per_second()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--milliseconds", type=float, default=4.0, help="that an image takes on a machine")
    parser.add_argument("--times", type=float, default=3.0, help="how much longer on the slow one")
    given = parser.parse_args()
    found: dict[tuple[str, float], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="shardmill-slow-") as folder:
        dataset_uri = make_dataset(Path(folder, "data"), num_images=NUM_IMAGES, chunk_bytes=100_000)
        for _ in range(given.rounds):
            for name, settings in CONTESTANTS.items():
                for times in (1.0, given.times):
                    os.environ[MILLISECONDS] = f"{given.milliseconds} {given.milliseconds * times}"
                    # As the slow machine needs: streams in proportion to its speed.
                    weights = {"rank_weights": (times, 1.0)} if "rank_weights" in name else {}
                    models = tempfile.mkdtemp(dir=folder)
                    speed = images_per_second({**settings, **weights}, dataset_uri, models)
                    found.setdefault((name, times), []).append(speed)
                    sys.stderr.write(f"{name} {times:g}: {speed:.0f} images/s\n")
    sys.stdout.write(f"| | two alike | one {given.times:g} times slower | of that left |\n|---|---|---|---|\n")
    for name in CONTESTANTS:
        even, slow = (statistics.median(found[name, times]) for times in (1.0, given.times))
        sys.stdout.write(f"| {name} | {even:.0f} | {slow:.0f} | {slow / even:.2f} |\n")


if __name__ == "__main__":
    main()
