"""Builds of a folder of images that changes, and what they leave."""

from __future__ import annotations

import random
import uuid
from pathlib import Path

import cv2
import numpy as np

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.jobs.config import DatasetConfig
from tests.etl.building import Recorder
from tests.lab.datasets import HERE

CONFIG = EtlConfig(
    engine=HERE, image_size=16, encoding="png", unit_min_images=16, chunk_bytes=4_000,
    formats=("parquet", "tfrecord"), max_reject_fraction=0.5,
)  # fmt: skip


def tree_for(folder: Path, dataset: str = "dataset", **etl: object) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / dataset)),
        etl=CONFIG.model_copy(update=etl),
    )


def build(folder: Path, dataset: str = "dataset", recorder: Recorder | None = None, **etl: object) -> BuildOutcome:
    return build_dataset(tree_for(folder, dataset, **etl), run_id=uuid.uuid4().hex, observer=recorder)


def opened(folder: Path, dataset: str = "dataset") -> Dataset:
    return open_dataset(str(folder / dataset))


def paint(file: Path, rng: random.Random) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 255, (16, 16, 3), np.uint8)
    assert cv2.imwrite(str(file), pixels)
