"""Trains the demo's digits with each strategy: speed, accuracy, and the share of time spent in exchange.

    make demo
    .venv/bin/python benchmarks/strategies.py demo-work/dataset

Epochs, global batch and learning rate are the same for all; each strategy starts from its own processes, in turn. A
process has its share of this machine's cores, so on few cores more ranks are no faster: what differs is what the
exchange costs, and what asynchronous and local updates do to the accuracy.

`silos` is `local_sgd` on three datasets made of the same training images, each of which has some of the digits alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import uuid
from pathlib import Path

import cv2

from etl.config import EtlConfig, EtlTree, SourceConfig, SplitFractions
from etl.job import build_dataset
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.loader.samples import iterate_samples
from train.config import TrainConfig
from train.reporting.observer import GlobalStep
from train.training import train_model
from train.tree import TrainTree

# What differs from strategy to strategy.
CONTESTANTS: dict[str, dict[str, object]] = {
    "single": {},
    "horovod": {"num_workers": 2},
    "multi_worker_mirrored": {"num_workers": 2},
    "mirrored": {"mirrored": {"num_devices": 2}},
    "parameter_server": {"num_workers": 2, "parameter_server": {"num_servers": 1}},
    "local_sgd": {"num_workers": 2, "local_sgd": {"local_steps": 4}, "global_batch_size": 256},
    "torch_ddp": {"num_workers": 2, "backend": "torch"},
    "silos": {"strategy": "local_sgd", "num_workers": 3, "global_batch_size": 192},
}
CLASSES_OF_SILOS = (("0", "1", "2", "3"), ("4", "5", "6"), ("7", "8", "9"))


class FirstStep:
    """A driver's observer that keeps when the first step was done."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def step(self, step: GlobalStep) -> None:
        self.seconds = self.seconds or time.perf_counter()

    def event(self, name: str, fields: object) -> None:
        return


def build_silos(dataset_uri: str, folder: Path) -> tuple[str, ...]:
    """The train split of a dataset as one dataset for each of CLASSES_OF_SILOS."""
    dataset = open_dataset(dataset_uri)
    names = dataset.manifest.class_names
    for sample in iterate_samples(dataset, "train"):
        name = names[sample.label or 0]
        [silo] = [number for number, classes in enumerate(CLASSES_OF_SILOS) if name in classes]
        target = folder / f"images{silo}" / name / f"{sample.sample_id}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        # OpenCV's order of channels.
        assert cv2.imwrite(str(target), sample.image_HWC[..., ::-1])
    all_train = SplitFractions(train=1.0, validation=0.0, test=0.0)
    height, width, _ = dataset.manifest.normalize.image_shape_HWC
    assert height == width
    for silo in range(len(CLASSES_OF_SILOS)):
        tree = EtlTree(
            source=SourceConfig(uri=str(folder / f"images{silo}")),
            dataset=DatasetConfig(uri=str(folder / f"silo{silo}")),
            etl=EtlConfig(engine="local", image_size=height, split_fractions=all_train),
        )
        build_dataset(tree, run_id=uuid.uuid4().hex)
    return tuple(f"{folder}/silo{silo}@1" for silo in range(len(CLASSES_OF_SILOS)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a dataset of small images, as `make demo` leaves it")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--only", default=",".join(CONTESTANTS))
    given = parser.parse_args()
    common: dict[str, object] = {
        "model": "small_cnn", "epochs": given.epochs, "global_batch_size": 64, "learning_rate": 2e-3,
        "optimizer": "adam", "augment": {"random_crop_padding": 2, "random_flip": True},
    }  # fmt: skip
    sys.stdout.write("| strategy | test accuracy | images/s | of it exchange | seconds to the first step |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    for name in given.only.split(","):
        # TensorFlow and PyTorch do not share a process, so the one rank of `single` gets its own too.
        settings = {**common, "strategy": name, "launcher": "local", **CONTESTANTS[name]}
        with tempfile.TemporaryDirectory() as models, tempfile.TemporaryDirectory() as silos:
            if name == "silos":
                of_silos = {"silos": build_silos(given.dataset, Path(silos)), "local_steps": 4}
                settings["local_sgd"] = of_silos
            tree = TrainTree(
                dataset=DatasetConfig(uri=str(Path(given.dataset).resolve())),
                models=ModelsConfig(uri=models),
                train=TrainConfig.model_validate(settings),
            )
            observer, start = FirstStep(), time.perf_counter()
            result = train_model(tree, observer).result
        assert result.evaluation is not None
        sys.stdout.write(
            f"| `{name}` | {result.evaluation.metric_value:.4f} | {result.images_per_second:.0f} | "
            f"{result.time_shares.allreduce:.0%} | {observer.seconds - start:.1f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
