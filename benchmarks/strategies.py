"""The same training of the demo's digits with each strategy: speed, accuracy, and how much of the time is exchange.

    make demo
    .venv/bin/python benchmarks/strategies.py demo-work/dataset

Epochs, global batch and learning rate are the same for all; each strategy starts from its own processes, in turn. A
process has its share of this machine's cores, so on few cores more ranks are no faster: what differs is what the
exchange costs, and what asynchronous and local updates do to the accuracy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from shardmill.jobs.config import DatasetConfig, ModelsConfig
from train.config import TrainConfig
from train.observer import GlobalStep
from train.training import train_model
from train.tree import TrainTree

# What differs from strategy to strategy.
CONTESTANTS: dict[str, dict[str, object]] = {
    "single": {},
    "horovod": {"num_workers": 2},
    "multi_worker_mirrored": {"num_workers": 2},
    "mirrored": {"local_devices": 2},
    "parameter_server": {"num_workers": 2, "parameter_servers": 1},
    "local_sgd": {"num_workers": 2, "local_steps": 4, "global_batch_size": 256},
    "torch_ddp": {"num_workers": 2},
}


class FirstStep:
    """A driver's observer that keeps when the first step was done."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, step: GlobalStep) -> None:
        self.seconds = self.seconds or time.perf_counter()

    def event(self, name: str, fields: object) -> None:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset of small images, as `make demo` leaves it")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    given = parser.parse_args()
    common: dict[str, object] = {
        "model": "small_cnn", "epochs": given.epochs, "global_batch_size": 64, "learning_rate": 2e-3,
        "optimizer": "adam", "augment": {"random_crop_padding": 2},
    }  # fmt: skip
    sys.stdout.write("| strategy | test accuracy | images/s | of it exchange | seconds to the first step |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for name in given.only.split(","):
        # TensorFlow and PyTorch do not share a process, so the one rank of `single` gets its own too.
        settings = {**common, "strategy": name, "launcher": "local", **CONTESTANTS[name]}
        if name == "torch_ddp":
            settings["backend"] = "torch"
        with tempfile.TemporaryDirectory() as models:
            tree = TrainTree(
                dataset=DatasetConfig(uri=str(Path(given.dataset).resolve())),
                models=ModelsConfig(uri=models),
                train=TrainConfig.model_validate(settings),
            )
            observer, start = FirstStep(), time.perf_counter()
            result = train_model(tree, observer).result
        assert result.evaluation is not None
        sys.stdout.write(
            f"| `{name}` | {result.evaluation.figure:.4f} | {result.images_per_second:.0f} | "
            f"{result.time_shares.allreduce:.0%} | {observer.seconds - start:.1f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
