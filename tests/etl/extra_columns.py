"""Sources with columns of their own."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import read_samples
from tests.etl.incremental import CONFIG
from tests.etl.source_files import picture

Row = dict[str, Any]


def write_files(folder: Path, count: int) -> None:
    for number in range(count):
        if not (folder / f"{number:03d}.png").exists():
            (folder / f"{number:03d}.png").write_bytes(picture(number))


def build(source: SourceConfig, folder: Path, **etl: object) -> BuildOutcome:
    config = CONFIG.model_copy(update={"unit_min_images": 8, **etl})
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder)), etl=config)
    return build_dataset(tree, run_id=uuid.uuid4().hex)


def stored(folder: Path) -> dict[str, Row]:
    """Source key -> extra values, of every row of the latest version, which must verify."""
    dataset = open_dataset(str(folder))
    verify_dataset(dataset, deep=True).raise_if_failed()
    samples = [sample for split in dataset.manifest.splits for sample in read_samples(dataset, split, 1000)]
    return {sample.source: dict(sample.extra) for sample in samples}
