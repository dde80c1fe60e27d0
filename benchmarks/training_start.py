"""Measures the seconds from the launch of a training on two ranks to its first step, for launchers and strategies.

    .venv/bin/python benchmarks/training_start.py --rounds 3

Every round starts each of them once, in turn. Spark's own start is included; a second training on Spark then starts on
the session that is there.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.jobs.spark import one_spark
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.launching import LAUNCHERS
from train.reporting.observer import GlobalStep

CASES = (("local", "horovod"), ("local", "torch_ddp"), ("spark_barrier", "torch_ddp"), ("spark_barrier", "horovod"),
         ("horovod_spark", "horovod"))  # fmt: skip
NUM_RANKS = 2


class FirstStep:
    """An observer that remembers when the first step came."""

    seconds = 0.0

    def step(self, step: GlobalStep) -> None:
        self.seconds = self.seconds or time.monotonic()

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        return


def seconds_to_first_step(launcher: str, strategy: str, dataset_uri: str, models_uri: str) -> float:
    """Of a training that then goes on for one short epoch."""
    config = TrainConfig(launcher=launcher, strategy=strategy, num_workers=NUM_RANKS, epochs=1)
    observer, start = FirstStep(), time.monotonic()
    task = WorkerTask(config, open_dataset(dataset_uri).pin, models_uri, "trainings/start", "")
    LAUNCHERS[launcher].launch(task, SparkConfig(master=f"local[{NUM_RANKS}]"), observer)
    return observer.seconds - start


def build_dataset(folder: Path) -> str:
    """300 small generated images of two classes."""
    rng = np.random.default_rng(0)
    for number in range(300):
        path = folder / "images" / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(path)
    words = ["etl", str(folder / "images"), "--workdir", str(folder), "--set", "etl.image_size=32"]
    subprocess.run([sys.executable, "-m", "pipeline.cli", *words], check=True, capture_output=True)
    return str(folder / "dataset")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="shardmill-start-") as folder:
        dataset_uri = build_dataset(Path(folder))
        seconds: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
        for number in range(rounds):
            for case in CASES:
                models = str(Path(folder, f"models-{number}-{'-'.join(case)}"))
                with one_spark():
                    seconds[case].append(seconds_to_first_step(*case, dataset_uri, models))
                    if "spark" in case[0]:
                        again = seconds_to_first_step(*case, dataset_uri, f"{models}-warm")
                        seconds[*case, "(warm)"].append(again)
    for case, each in seconds.items():
        values = " ".join(f"{one:.1f}" for one in each)
        sys.stdout.write(f"{' '.join(case):32s} {statistics.median(each):6.1f} s (rounds: {values})\n")


if __name__ == "__main__":
    main()
