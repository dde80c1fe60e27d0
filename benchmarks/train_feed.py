"""Measures how fast a training takes batches if its model does nothing, beside the loader alone.

    .venv/bin/python -m benchmarks.train_feed --dataset URI@N [--rounds K]

A rank's training loop runs as usual in this process, with its reports, times and optimizer. Only the model's part of a
step is left out, the conversion of pixels to float32 included, and PyTorch gets one thread: it would divide an
optimizer's few weights among several, which wait for one another. `dataset.batches` reads the same epochs with the same
threads, in turns with it. An epoch counts from its first batch to its last; the first one, which warms up, does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.results import hardware
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.loader.dataset import LoadableDataset, open_dataset
from train.backends.torch.passes import WholeModel
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import StepReport
from train.contracts.world import World
from train.models.user import source_sha256
from train.planning.setup import resolve
from train.rank.worker import run_worker

NUM_THREADS, BATCH_SIZE = 2, 256
EPOCHS = 2
TITLE = (
    "| images | loader | training | training / loader | CPU an image: loader | training | loader / training |\n"
    "|---|---|---|---|---|---|---|\n"
)


Moment = tuple[float, float]
"""Seconds of the clock, and of this process's work."""


def now() -> Moment:
    return time.perf_counter(), time.process_time()


@dataclass(frozen=True)
class Rate:
    """How fast batches came."""

    per_second: float
    cpu_microseconds: float
    """Work of the process for one image: what other processes of a busy machine change least."""

    @classmethod
    def of(cls, ends: list[Moment]) -> Rate:
        num_images = BATCH_SIZE * (len(ends) - 1)
        seconds, cpu_seconds = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
        return cls(num_images / seconds, 1e6 * cpu_seconds / num_images)


class Steps:
    """A reporter that notes when each step of the last epoch ended."""

    def __init__(self) -> None:
        self.ends: list[Moment] = []

    def step(self, report: StepReport) -> None:
        if report.epoch == EPOCHS - 1:
            self.ends.append(now())

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None: ...

    def doing(self, activity: Activity) -> Activity:
        return activity


def model(image_shape: tuple[int, int, int], num_classes: int) -> Any:
    """A few weights; what is left out of a step never calls it."""
    import torch

    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, num_classes))


def nothing(of: WholeModel, batch: Any, weights_N: Any, objective: Any, before_backward: Callable[[], None]) -> None:
    """In place of both passes of a step: gradients of 0, and nothing that looks at an image."""
    before_backward()
    zero: Any = sum((weight * 0).sum() for weight in of._parts.classifier.parameters())
    zero.backward()


def train_rate(dataset: LoadableDataset, config: TrainConfig) -> Rate:
    """The rate of the last epoch's steps."""
    seen = Steps()
    with tempfile.TemporaryDirectory(prefix="shardmill-feed-") as folder:
        task = WorkerTask(config, dataset.pin, folder, "t", source_sha256(config.model))
        run_worker(task, World(ranks_per_node=len(os.sched_getaffinity(0))), seen)
    return Rate.of(seen.ends)


def loader_rate(dataset: LoadableDataset, config: TrainConfig) -> Rate:
    """The rate of the same epoch's batches."""
    with dataset.batches(
        "train", global_batch_size=BATCH_SIZE, seed=config.seed, num_threads=NUM_THREADS, rank=0, world_size=1,
        augment=config.augmentation,
    ) as loader:  # fmt: skip
        for _ in range(EPOCHS):
            ends = [now() for _ in loader]
    return Rate.of(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, action="append", help="URI@N; may be given again")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    setattr(WholeModel, "differentiate", nothing)  # noqa: B010
    sys.stdout.write(
        f"{hardware()}; {NUM_THREADS} threads, batches of {BATCH_SIZE}, medians of {arguments.rounds} rounds\n\n"
    )
    sys.stdout.write(TITLE)
    for uri in arguments.dataset:
        sys.stdout.write(row(open_dataset(uri), arguments.rounds) + "\n")
        sys.stdout.flush()


def row(dataset: LoadableDataset, rounds: int) -> str:
    """One row of the table."""
    asked = TrainConfig.model_validate(
        {
            "backend": "torch", "model": "benchmarks.train_feed:model", "global_batch_size": BATCH_SIZE,
            "num_streams": 8, "epochs": EPOCHS, "checkpoint_every_steps": 0, "num_workers": 1,
            "augment": {"preset": "none"}, "reading": {"threads": NUM_THREADS},
        }
    )  # fmt: skip
    config = resolve(asked, SparkConfig()).config
    rates: dict[str, list[Rate]] = {"loader": [], "train": []}
    for number in range(rounds):
        turns = [("loader", loader_rate), ("train", train_rate)]
        for name, rate in turns[:: -1 if number % 2 else 1]:
            rates[name].append(rate(dataset, config))
    pairs = list(zip(rates["loader"], rates["train"], strict=True))
    loader, train = (statistics.median(rate.per_second for rate in each) for each in rates.values())
    loader_cpu, train_cpu = (statistics.median(rate.cpu_microseconds for rate in each) for each in rates.values())
    shares = [mine.per_second / alone.per_second for alone, mine in pairs]
    of_cpu = statistics.median(alone.cpu_microseconds / mine.cpu_microseconds for alone, mine in pairs)
    shape = " x ".join(map(str, dataset.manifest.normalize.image_shape_HWC[:2]))
    num_rows = dataset.manifest.splits["train"].num_rows
    return (
        f"| {num_rows:,} of {shape}, {dataset.manifest.normalize.encoding} | {loader:,.0f}/s | {train:,.0f}/s | "
        f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}) | "
        f"{loader_cpu:.0f} us | {train_cpu:.0f} us | {of_cpu:.2f} |"
    )


if __name__ == "__main__":
    main()
