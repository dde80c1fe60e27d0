"""While a training runs, the version that it reads does not expire."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlConfig
from shardmill.dataset.maintenance.gc import collect_garbage
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.open import open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.stores import open_store
from tests.lab.datasets import build_here, make_dataset
from train.config import TrainConfig
from train.training import train_model
from train.tree import TrainTree


class Stopped(Exception):
    """Ends a training before its ranks start."""


class CollectsBeforeTheRanksStart:
    """An observer that runs `gc` when the training is planned, then stops it."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.expired: tuple[int, ...] = ()

    def step(self, step: object) -> None:
        raise AssertionError("a rank started")

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        if name == "plan":
            self.expired = collect(self.root)
            raise Stopped


def collect(root: str) -> tuple[int, ...]:
    return collect_garbage(open_store(root), Retention(keep=1, older_than_seconds=0.0), "gc").expired


def test_a_version_does_not_expire_while_a_training_reads_it(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=60, formats=("parquet",))
    pin = open_dataset(root).pin
    for image_size in (8, 9):
        build_here(str(tmp_path / "images"), root, EtlConfig(image_size=image_size))
    tree = TrainTree(
        dataset=DatasetConfig(uri=root),
        models=ModelsConfig(uri=str(tmp_path / "models")),
        train=TrainConfig(epochs=1, global_batch_size=8, num_streams=2, launcher="inline"),
    )
    observer = CollectsBeforeTheRanksStart(root)
    with pytest.raises(Stopped):
        train_model(tree, observer, pin)
    assert observer.expired == (2,)
    assert collect(root) == (1,)
