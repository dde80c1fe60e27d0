"""Measures how long a checkpoint of a 100 MB model stalls a training, compared with writing the same bytes
synchronously.

    .venv/bin/python benchmarks/checkpoint_stall.py --backend torch --scratch DIR
    .venv/bin/python benchmarks/checkpoint_stall.py --backend keras --scratch DIR

Ours: the member's arrays are copied and handed over, and the next step begins; what is printed is the time until then,
the time until the checkpoint is complete in the store, and the longest step meanwhile. By hand: the same state is
written, synced and hashed before the next step. Adam, so that a checkpoint is three times the model.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.training_step import NUM_CLASSES, SHAPE, SPEC, SilentReporter
from shardmill.checksummed import checksum_file
from shardmill.stores import open_store
from shardmill.values import Batch, DatasetPin
from train.backends import BACKENDS
from train.checkpoints.arrays import dump_arrays
from train.checkpoints.checkpoint import CheckpointFolder, TrainingIdentity, claim_attempt
from train.checkpoints.checkpoint_writer import CheckpointWriter, Moment
from train.config import TrainConfig
from train.contracts.values import ModelIdentity, Progress
from train.contracts.world import World
from train.strategies import STRATEGIES

HIDDEN = 2000


def torch_wide(image_shape: tuple[int, int, int], num_classes: int) -> object:
    """About 25 million weights, most of them in one layer."""
    from torch import nn

    return nn.Sequential(
        nn.Flatten(), nn.Linear(int(np.prod(image_shape)), HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, num_classes)
    )


def keras_wide(image_shape: tuple[int, int, int], num_classes: int) -> object:
    """Likewise."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [layers.Input(image_shape), layers.Flatten(), layers.Dense(HIDDEN, "relu"), layers.Dense(num_classes)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "keras"), default="torch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scratch", type=Path, default=None)
    given = parser.parse_args()
    config = TrainConfig(
        strategy="single", model=f"benchmarks.checkpoint_stall:{given.backend}_wide", optimizer="adam", num_workers=1
    )
    backend = BACKENDS[given.backend]
    backend.start(World(), config.seed)
    member = STRATEGIES["single"].join(World(), config, partial(backend.build, config, SPEC), SilentReporter())
    member.start({}, 0, "")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (16, *SHAPE), dtype=np.uint8)
    batch = Batch(images, rng.integers(0, NUM_CLASSES, 16), np.ones(16, np.float32), np.arange(16), 0, 0)

    def step() -> float:
        start = time.perf_counter()
        member.train_step(batch, 16, None)
        return time.perf_counter() - start

    figures: dict[str, list[float]] = {name: [] for name in ("blocked", "complete after", "longest step", "by hand")}
    with tempfile.TemporaryDirectory(dir=given.scratch) as scratch:
        folder = CheckpointFolder(claim_attempt(open_store(scratch), "t", 1), keep_checkpoints=2)
        identity = TrainingIdentity(DatasetPin("u", 1, "s"), "plan", ModelIdentity("", ""), {})
        with CheckpointWriter(folder, member, SilentReporter()) as writer:
            writer.copy_state()
            for _ in range(5):
                step()
            plain_steps = [step() for _ in range(10)]
            for number in range(given.rounds):
                start = time.perf_counter()
                writer.begin(Moment(folder.path_of(number), writer.copy_state(), identity, Progress(), number, 1))
                figures["blocked"].append(time.perf_counter() - start)
                meanwhile = [step()]
                while writer.is_writing:
                    meanwhile.append(step())
                written = writer.take()
                assert written is not None and not written.problem, written
                figures["complete after"].append(written.seconds)
                del written
                figures["longest step"].append(max(meanwhile))

                os.sync()
                start = time.perf_counter()
                for name, arrays in member.state_files().items():
                    data = dump_arrays(arrays)
                    folder.store.put(f"by-hand/{name}", data)
                    checksum_file(name, data)
                figures["by hand"].append(time.perf_counter() - start)
                os.sync()
        sizes = [sum(array.nbytes for array in arrays) for arrays in member.state_files().values()]
    sys.stdout.write(
        f"{given.backend}: weights {max(sizes[1:2]) / 1e6:.0f} MB, checkpoint {sum(sizes) / 1e6:.0f} MB; a step is "
        f"{statistics.median(plain_steps):.3f} s; medians (and the worst) of {given.rounds}\n"
    )
    for name, seconds in figures.items():
        sys.stdout.write(f"{name:15s} {statistics.median(seconds):8.3f} s   ({max(seconds):.3f})\n")
    ratios = [ours / theirs for ours, theirs in zip(figures["blocked"], figures["by hand"], strict=True)]
    sys.stdout.write(f"blocked / by hand: {statistics.median(ratios):.3f} (median of the pairs' ratios)\n")


if __name__ == "__main__":
    main()
