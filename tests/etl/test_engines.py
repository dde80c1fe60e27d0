"""Every engine of the registry does the same work: equal bytes, whatever runs the units."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.engines import ENGINES
from etl.job import build_dataset
from shardmill.dataset.open import open_dataset
from shardmill.jobs.config import DatasetConfig, SparkConfig
from tests.etl.building import ETL, digests
from tests.support import build_here


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_the_shards_of_units_in_order(engine: str, images: Path):
    source = SourceConfig(uri=str(images / "images"))
    dataset = DatasetConfig(uri=str(images / f"by_{engine}"))
    etl = ETL.model_copy(update={"engine": engine})
    tree = EtlTree(source=source, dataset=dataset, etl=etl, spark=SparkConfig(master="local[2]"))
    here = open_dataset(build_here(source.uri, str(images / f"here_{engine}"), ETL)).manifest
    assert digests(build_dataset(tree, run_id="r")) == (here.content_digest, here.layout_digest)
