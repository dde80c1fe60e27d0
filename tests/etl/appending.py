"""Builds that append to one dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING, FieldValue
from tests.lab.datasets import HERE

_ETL = EtlConfig(
    engine=HERE, image_size=16, encoding="png", unit_min_images=64, chunk_bytes=4_000,
    max_reject_fraction=0.5,
)  # fmt: skip


class At:
    """An observer that calls `then` the first time that the event `name` comes."""

    def __init__(self, name: str, then: Callable[[], object]) -> None:
        self.name, self.then, self.events, self.warnings = name, then, [], []

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.events.append(name)
        if WARNING in fields:
            self.warnings.append(str(fields[WARNING]))
        if name == self.name and self.events.count(name) == 1:
            self.then()


def build(
    folder: Path,
    source: str,
    dataset: str = "dataset",
    *,
    run_id: str = "run",
    observer: At | None = None,
    replace_source: bool = False,
    check_labels: Callable[[RowSchema], None] | None = None,
    dataset_uri: str = "",
    **etl: object,
) -> BuildOutcome:
    tree = EtlTree(
        source=SourceConfig(uri=str(folder / source)),
        dataset=DatasetConfig(uri=dataset_uri or str(folder / dataset)),
        etl=_ETL.model_copy(update={"write_mode": "append", **etl}),
    )
    return build_dataset(
        tree, run_id=run_id, observer=observer, replace_source=replace_source, check_labels=check_labels
    )
