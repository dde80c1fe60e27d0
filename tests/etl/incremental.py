"""Builds of sources that change, some with columns of their own, and what they leave."""

from __future__ import annotations

import random
import uuid
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import read_samples
from tests.etl.building import Recorder
from tests.etl.source_files import picture
from tests.lab.datasets import HERE

CONFIG = EtlConfig(
    engine=HERE, image_size=16, encoding="png", unit_min_images=16, chunk_bytes=4_000,
    formats=("parquet", "tfrecord"), max_reject_fraction=0.5,
)  # fmt: skip


def tree_for(folder: Path, dataset: str = "dataset", source: SourceConfig | None = None, **etl: object) -> EtlTree:
    source = source or SourceConfig(uri=str(folder / "images"))
    return EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / dataset)), etl=CONFIG.model_copy(update=etl))


def build(folder: Path, dataset: str = "dataset", recorder: Recorder | None = None, **etl: object) -> BuildOutcome:
    return build_dataset(tree_for(folder, dataset, **etl), run_id=uuid.uuid4().hex, observer=recorder)


def opened(folder: Path, dataset: str = "dataset") -> Dataset:
    return open_dataset(str(folder / dataset))


def paint(file: Path, rng: random.Random) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(rng.randrange(2**32)).integers(0, 255, (16, 16, 3), np.uint8)
    assert cv2.imwrite(str(file), pixels)


Row = dict[str, Any]


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        if not (folder / f"{number:03d}.png").exists():
            (folder / f"{number:03d}.png").write_bytes(picture(number))


def build_from(source: SourceConfig, folder: Path, **etl: object) -> BuildOutcome:
    return build(folder.parent, folder.name, source=source, **{"unit_min_images": 8, **etl})


def stored(folder: Path) -> dict[str, Row]:
    """Source key -> extra values, of every row of the latest version, which must verify."""
    dataset = open_dataset(str(folder))
    verify_dataset(dataset, deep=True).raise_if_failed()
    samples = [sample for split in dataset.manifest.splits for sample in read_samples(dataset, split, 1000)]
    return {sample.source: dict(sample.extra) for sample in samples}
