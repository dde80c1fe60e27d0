"""Before a unit runs: one dataset follows one source, and what was inferred of it is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import plan_build
from etl.write_unit import write_unit
from shardmill.config import DatasetConfig
from shardmill.dataset.manifest import latest_version
from shardmill.errors import UsageError
from shardmill.storage import open_store
from tests.support import build_here, write_images

ETL = EtlConfig(image_size=16, encoding="png", unit_min_images=20)


def tree_for(source: Path, dataset: Path, **etl: object) -> EtlTree:
    config = ETL.model_copy(update=etl)
    return EtlTree(source=SourceConfig(uri=str(source)), dataset=DatasetConfig(uri=str(dataset)), etl=config)


def test_a_second_source_does_not_replace_the_first_ones_images(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    write_images(tmp_path / "cars", num_images=40, seed=1)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    with pytest.raises(UsageError, match=f"was made from {tmp_path}/cats, not from {tmp_path}/cars") as caught:
        build_dataset(tree_for(tmp_path / "cars", tmp_path / "dataset"), run_id="b")
    assert "--workdir" in str(caught.value) and "--replace-source" in str(caught.value)
    assert latest_version(open_store(tmp_path / "dataset")) == 1
    # The first one goes on as before.
    assert build_dataset(tree_for(tmp_path / "cats", tmp_path / "dataset"), run_id="c").skipped


def test_a_source_that_has_moved_goes_on_and_a_changed_one_when_it_is_said(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    (tmp_path / "cats").rename(tmp_path / "moved")
    tree = tree_for(tmp_path / "moved", tmp_path / "dataset")
    assert build_dataset(tree, run_id="b").skipped

    write_images(tmp_path / "moved", num_images=41)
    plan = plan_build(tree, run_id="c")
    for unit in plan.units:
        # Finished units are kept, so that this test needs no engine.
        write_unit(unit, plan.task)
    with pytest.raises(UsageError, match="--replace-source"):
        build_dataset(tree, run_id="c")
    outcome = build_dataset(tree, run_id="c", replace_source=True)
    assert (outcome.manifest.version, outcome.manifest.source.uri) == (2, str(tmp_path / "moved"))
