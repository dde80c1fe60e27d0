"""The ETL as a whole: equal digests whatever runs it, limits that hold, what touches nothing and what is refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import plan_build
from etl.units.write_unit import write_unit
from shardmill.dataset.open import open_dataset
from shardmill.dataset.unit_result import PENDING
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig, SparkApplicationConfig, SparkConfig
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.etl.building import ETL, digests, tree_for
from tests.lab.datasets import build_here, write_images

SPARK = ETL.model_copy(update={"engine": "spark"})


@pytest.mark.starts("jvm", "program")
def test_digests_are_equal_on_any_engine_master_and_partitioning(images: Path):
    settings = {"spark.sql.shuffle.partitions": "3", "spark.default.parallelism": "7",
                "spark.sql.execution.arrow.maxRecordsPerBatch": "1"}  # fmt: skip
    one = build_dataset(tree_for(images, "one", SparkConfig(master="local[1]"), SPARK), run_id="a")
    spark = SparkConfig(master="local[2]", etl=SparkApplicationConfig(conf=settings))
    two = build_dataset(tree_for(images, "two", spark, SPARK), run_id="b")
    assert one.num_units > 4
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    assert digests(one) == digests(two) == (here.content_digest, here.layout_digest)
    counts = one.manifest.counts
    assert (counts.listed, counts.accepted, counts.rejected) == (162, 160, 2)
    assert counts.by_reason == {"not_an_image": 1, "not_an_image_name": 1}
    verify_dataset(open_dataset(str(images / "two")), deep=True).raise_if_failed()

    # Running it again with nothing changed makes no version, and starts no Spark.
    again = build_dataset(tree_for(images, "two", SparkConfig(master="there is no such master"), SPARK), run_id="c")
    assert again.skipped and again.pin == two.pin
    assert list(open_store(images / "two").list(PENDING)) == []


@pytest.mark.parametrize("engine", ["local", "auto"])
def test_a_build_with_nothing_to_do_starts_no_process(engine: str, images: Path):
    tree = tree_for(images, "d", etl=ETL.model_copy(update={"engine": engine}))
    build_here(tree.source.uri, tree.dataset.uri, tree.etl)
    assert build_dataset(tree, run_id="again").skipped
    # Whether there is work, the listing tells; that there is none is a version without an image, too.
    (images / "images" / "class_0" / "broken.jpg").unlink()
    gone = build_dataset(tree, run_id="gone")
    assert (gone.published, gone.num_images_read, gone.manifest.counts.rejected) == (True, 0, 1)


def test_too_many_rejects_publish_nothing_and_name_reasons_and_ledger(images: Path):
    strict = ETL.model_copy(update={"max_reject_fraction": 0.001})
    expected = r"1 of 162 inputs were rejected \(not_an_image 1\), such as class_0/broken.jpg.*--rejects .*/rejects/"
    with pytest.raises(RejectLimitExceeded, match=expected):
        build_dataset(tree_for(images, "strict", etl=strict), run_id="a")
    assert latest_version(open_store(images / "strict")) == 0
    # With a limit that allows it, the units that were finished are kept.
    assert build_dataset(tree_for(images, "strict"), run_id="b").num_units_kept > 0


def test_a_lowered_limit_is_also_held_against_what_was_committed(images: Path):
    build_here(str(images / "images"), str(images / "committed"), ETL)
    strict = ETL.model_copy(update={"max_reject_fraction": 0.001})
    with pytest.raises(RejectLimitExceeded, match=r"1 of 162 inputs"):
        build_dataset(tree_for(images, "committed", etl=strict), run_id="a")


def test_sources_that_change_or_vanish_after_the_listing_are_counted(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    plan = plan_build(tree_for(tmp_path, "dataset"), run_id="a")
    first, second = sorted((tmp_path / "images" / "class_1").iterdir())[:2]
    first.unlink()
    second.write_bytes(second.read_bytes() + b"grown")
    rejections = [rejection for unit in plan.units for rejection in write_unit(unit, plan.task).rejections]
    assert {(rejection.key, str(rejection.reason)) for rejection in rejections} == {
        (f"class_1/{first.name}", "missing"),
        (f"class_1/{second.name}", "source_changed"),
    }


def test_duplicates_are_accepted_counted_and_in_one_split(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    original = next((tmp_path / "images" / "class_0").iterdir())
    for number in range(5):
        (tmp_path / "images" / "class_0" / f"copy{number}.png").write_bytes(original.read_bytes())
    dataset = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL))
    assert dataset.manifest.counts.duplicate_content == 5
    copies = {f"class_0/copy{number}.png" for number in range(5)} | {f"class_0/{original.name}"}
    splits = {
        split
        for split, info in dataset.manifest.splits.items()
        for sample in read_samples(dataset, split, info.num_rows)
        if sample.source in copies
    }
    assert len(splits) == 1


def test_channel_statistics_are_those_of_the_train_pixels(tmp_path: Path):
    import numpy as np

    write_images(tmp_path / "images", num_images=60)
    dataset = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL))
    pixels = np.stack([sample.image_HWC for sample in read_samples(dataset, "train", 100)]).astype(np.float64)
    assert np.allclose(dataset.manifest.channel_mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(dataset.manifest.channel_std, pixels.std((0, 1, 2)), rtol=1e-9)


def test_an_executor_with_another_decoder_is_refused(tmp_path: Path):
    import dataclasses

    write_images(tmp_path / "images", num_images=4)
    plan = plan_build(tree_for(tmp_path, "dataset"), run_id="a")
    other = dataclasses.replace(plan.task, decoder_id="simplejpeg-0")
    with pytest.raises(UsageError, match="the driver decodes with simplejpeg-0"):
        write_unit(plan.units[0], other)


@pytest.mark.drill
def test_an_error_of_a_task_reaches_the_driver_as_itself(tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "shards").write_bytes(b"a file where a folder must be")
    with pytest.raises(StorageError, match="cannot access .*/blocked/shards"):
        build_dataset(tree_for(tmp_path, "blocked", etl=SPARK), run_id="a")


@pytest.mark.parametrize("inside", ["images", "images/class_0/work/dataset"])
def test_a_dataset_inside_its_own_source_is_refused(inside: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    with pytest.raises(UsageError, match="is inside source.uri.*--workdir"):
        build_dataset(tree_for(tmp_path, inside), run_id="a")


@pytest.mark.parametrize("missing", ["source", "dataset"])
def test_an_unset_uri_is_named(missing: str, tmp_path: Path):
    tree = tree_for(tmp_path, "dataset")
    section = SourceConfig() if missing == "source" else DatasetConfig()
    with pytest.raises(UsageError, match=f"{missing}.uri is not set"):
        build_dataset(tree.model_copy(update={missing: section}), run_id="a")


def test_touched_files_make_no_version_and_are_processed_once(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)
    for file in (tmp_path / "images").rglob("*.png"):
        os.utime(file, ns=(1, 1))
    first = build_dataset(tree_for(tmp_path, "dataset"), run_id="touched")
    assert (first.manifest.version, first.published, first.num_units_kept) == (1, False, 0)
    num_files = sum(1 for _ in (tmp_path / "dataset").rglob("*"))
    second = build_dataset(tree_for(tmp_path, "dataset"), run_id="again")
    assert (second.manifest.version, second.num_units_kept) == (1, second.num_units)
    # What was kept says nothing about the pace.
    assert first.images_per_second * first.seconds == pytest.approx(60) and second.images_per_second == 0
    assert sum(1 for _ in (tmp_path / "dataset").rglob("*")) == num_files


def test_a_pinned_dataset_cannot_be_built(tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    with pytest.raises(UsageError, match="names one version.*set dataset.uri to .*/dataset$"):
        build_dataset(tree_for(tmp_path, "dataset@2"), run_id="a")


@pytest.mark.drill
def test_executors_with_another_working_directory_read_and_write_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Real executors: JVMs of their own, each in a folder of its own.
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", num_images=60)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    tree = EtlTree(
        source=SourceConfig(uri="images"),
        dataset=DatasetConfig(uri="dataset"),
        etl=SPARK,
        spark=SparkConfig(
            master="local-cluster[2,1,512]",
            etl=SparkApplicationConfig(conf={"spark.executor.memory": "512m", "spark.ui.enabled": "false"}),
        ),
    )
    outcome = build_dataset(tree, run_id="a")
    assert outcome.manifest.counts.accepted == 60
    verify_dataset(open_dataset("dataset"), deep=True).raise_if_failed()
