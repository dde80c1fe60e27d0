"""One small ETL config, and what its tests ask of a build."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome
from shardmill.formats import SHARD_FORMATS
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.jobs.observer import FieldValue

ETL = EtlConfig(image_size=16, encoding="png", unit_min_images=20, chunk_bytes=8_000, formats=tuple(SHARD_FORMATS))


def tree_for(
    folder: Path, dataset: str, spark: SparkConfig | None = None, etl: EtlConfig = ETL, scheme: str = ""
) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=f"{scheme}{folder}/images"),
        dataset=DatasetConfig(uri=str(folder / dataset)),
        etl=etl,
        spark=spark or SparkConfig(),
    )


class Recorder:
    def __init__(self) -> None:
        self.events: dict[str, Mapping[str, FieldValue]] = {}

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.events[name] = fields


def digests(outcome: BuildOutcome) -> tuple[str, str]:
    return outcome.manifest.content_digest, outcome.manifest.layout_digest
