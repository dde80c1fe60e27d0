"""Measures how far the losses of two and three ranks are from those of one, step by step, for several kinds of models.

    make demo
    .venv/bin/python benchmarks/world_size_drift.py demo-work/dataset

The global batches are the same; what differs is the order in which gradients are added. Prints the largest relative
difference of a loss up to each of STEPS.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from train.config import TrainConfig
from train.reporting.observer import GlobalStep
from train.training import train_model
from train.tree import TrainTree

STEPS = (1, 10, 25, 50, 100)
GLOBAL_BATCH_SIZE = 48
WORLD_SIZES = (2, 3)
MODELS = {
    "smooth": "convolutions by steps of two, GELU",
    "relu": "convolutions by steps of two, ReLU",
    "relu_pool": "convolutions, ReLU, max pooling",
    "relu_pool_norm": "convolutions, batch norm (`sync_batch_norm`), ReLU, max pooling",
}
STRATEGIES = {"horovod": "keras", "torch_ddp": "torch"}


class Losses:
    """A driver's observer that keeps the loss of every step."""

    def __init__(self) -> None:
        self.of_steps: list[float] = []

    def step(self, step: GlobalStep) -> None:
        self.of_steps.append(float.fromhex(step.loss_hex))

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset of small images, as `make demo` leaves it")
    parser.add_argument("--only", default=",".join(MODELS))
    given = parser.parse_args()
    sys.stdout.write(f"| model | strategy | ranks | {' | '.join(f'{step} steps' for step in STEPS)} |\n")
    sys.stdout.write(f"|---|---|---|{'---|' * len(STEPS)}\n")
    for kind in given.only.split(","):
        for strategy, backend in STRATEGIES.items():
            one = _losses(given.dataset, kind, backend, {"strategy": "single"})
            for num_workers in WORLD_SIZES:
                several = _losses(given.dataset, kind, backend, {"strategy": strategy, "num_workers": num_workers})
                found = [abs(here / alone - 1) for here, alone in zip(several, one, strict=True)]
                row = " | ".join(f"{max(found[:step]):.1e}" for step in STEPS)
                sys.stdout.write(f"| {MODELS[kind]} | `{strategy}` | {num_workers} | {row} |\n")
                sys.stdout.flush()


def _losses(dataset: str, kind: str, backend: str, how: Mapping[str, object]) -> list[float]:
    steps_per_epoch = -(-open_dataset(dataset).manifest.splits["train"].num_rows // GLOBAL_BATCH_SIZE)
    settings = {
        "model": f"benchmarks.drift_models_{backend}:{kind}", "backend": backend, "launcher": "local", "num_workers": 1,
        "global_batch_size": GLOBAL_BATCH_SIZE, "num_streams": 12, "label_smoothing": 0.1,
        "epochs": -(-STEPS[-1] // steps_per_epoch), "sync_batch_norm": "norm" in kind, **how,
    }  # fmt: skip
    observer = Losses()
    with tempfile.TemporaryDirectory() as models:
        tree = TrainTree(
            dataset=DatasetConfig(uri=str(Path(dataset).resolve())),
            models=ModelsConfig(uri=models),
            train=TrainConfig.model_validate(settings),
        )
        train_model(tree, observer)
    return observer.of_steps


if __name__ == "__main__":
    main()
