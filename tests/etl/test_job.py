"""The ETL as a job: its plan, what it runs of the user, and what becomes of the dataset."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import traceback
from pathlib import Path

import pytest

from etl.checks.listing import current_version, emptied_splits, inferred_facts, inferred_warnings
from etl.checks.version import version_warnings
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from etl.plan import BuildPlan, plan_build
from etl.units.write_unit import write_unit
from etl.user_code import own_error
from shardmill.dataset.build import PENDING
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded, ShardmillError, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig, SparkApplicationConfig, SparkConfig
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.etl.building import ETL, Recorder, digests, tree_for
from tests.lab.datasets import HERE, build_here, write_images

SMALL = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=20)


def planned_tree(source: Path, dataset: Path, **etl: object) -> EtlTree:
    config = SMALL.model_copy(update=etl)
    return EtlTree(source=SourceConfig(uri=str(source)), dataset=DatasetConfig(uri=str(dataset)), etl=config)


def test_a_second_source_does_not_replace_the_first_ones_images(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    write_images(tmp_path / "cars", num_images=40, seed=1)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), SMALL)
    with pytest.raises(UsageError, match=f"was built from {tmp_path}/cats, not from {tmp_path}/cars") as caught:
        build_dataset(planned_tree(tmp_path / "cars", tmp_path / "dataset"), run_id="b")
    assert "--workdir" in str(caught.value) and "--replace-source" in str(caught.value)
    assert latest_version(open_store(tmp_path / "dataset")) == 1
    # The first one goes on as before.
    assert build_dataset(planned_tree(tmp_path / "cats", tmp_path / "dataset"), run_id="c").skipped


def test_a_source_that_has_moved_goes_on_and_a_changed_one_when_it_is_said(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), SMALL)
    (tmp_path / "cats").rename(tmp_path / "moved")
    tree = planned_tree(tmp_path / "moved", tmp_path / "dataset")
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


def test_a_copied_source_replaces_the_first_one_for_good(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), SMALL)
    write_images(tmp_path / "copy", num_images=40)
    tree = planned_tree(tmp_path / "copy", tmp_path / "dataset")
    plan = plan_build(tree, run_id="b")
    for unit in plan.units:
        write_unit(unit, plan.task)
    replaced = build_dataset(tree, run_id="b", replace_source=True)
    assert (replaced.manifest.version, replaced.manifest.source.uri) == (2, str(tmp_path / "copy"))
    assert build_dataset(tree, run_id="c").skipped


def test_a_commit_that_was_interrupted_is_remembered_by_the_next_build(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), SMALL)
    remembered = tmp_path / "dataset" / "committed" / "00000001.json"
    before = remembered.read_bytes()
    remembered.unlink()
    assert build_dataset(planned_tree(tmp_path / "cats", tmp_path / "dataset"), run_id="b").skipped
    assert remembered.read_bytes() == before
    remembered.unlink()
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), SMALL)
    assert remembered.read_bytes() == before


def test_a_small_split_without_a_class_is_warned_of_when_it_is_made(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=30)
    write_images(tmp_path / "images" / "test", num_images=4, num_classes=1)
    root = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), SMALL)
    [warning] = version_warnings(open_store(root), open_dataset(root).manifest)
    assert warning.startswith(
        "the split test has no image of 2 of 3 classes (class_1, class_2): add images, or set etl."
    )


def test_a_split_that_the_content_hashes_left_empty_is_warned_of(tmp_path: Path):
    write_images(tmp_path / "images", num_images=12)
    plan = plan_build(planned_tree(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), SMALL)
    manifest = open_dataset(str(tmp_path / "dataset")).manifest
    assert list(emptied_splits(plan, manifest)) == []
    of_train = {name: split for name, split in manifest.splits.items() if name == "train"}
    [validation, test] = emptied_splits(plan, manifest.model_copy(update={"splits": of_train}))
    assert validation.startswith("the split validation is empty; 1 of 12 images were expected in it")
    assert "the split test is empty" in test


def test_what_was_inferred_is_said_and_what_looks_wrong_is_warned_of(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=30)
    write_images(tmp_path / "images" / "test", num_images=4, num_classes=4)
    (tmp_path / "images" / "train" / "class_0" / "deeper").mkdir()
    (tmp_path / "images" / "train" / "class_0" / "00000.png").rename(
        tmp_path / "images" / "train" / "class_0" / "deeper" / "0.png"
    )
    plan = plan_build(planned_tree(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    facts = inferred_facts(plan)
    assert (facts["images"], facts["num_classes"]) == (34, 4)
    assert facts["classes"] == "class_0, class_1, class_2, class_3"
    assert facts["splits"] == "by folder train 30, test 4"
    assert facts["image"] == "16 x 16 x 3, png, resized by crop" and facts["dataset"] == str(tmp_path / "dataset")
    assert list(inferred_warnings(plan)) == [
        "the split validation will be empty",
        "the split test will have 4 images, fewer than 30: metrics on it are not reliable",
        "1 of 4 classes have fewer than 3 images (class_3: 1)",
        "1 of 4 classes have no image in train/ (class_3)",
        "1 of 34 images are deeper than their class folder, such as train/class_0/deeper/0.png, assigned to class "
        "class_0; set source.label_level to change this",
    ]


def test_a_sound_source_gives_no_warning(tmp_path: Path):
    write_images(tmp_path / "images", num_images=300)
    plan = plan_build(planned_tree(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert inferred_facts(plan)["splits"] == "by content hash, about train 240, validation 30, test 30"
    assert list(inferred_warnings(plan)) == []


def test_planned_splits_that_are_small_or_lack_a_class_are_warned_of_before_any_work(tmp_path: Path):
    write_images(tmp_path / "images", num_images=144)
    plan = plan_build(planned_tree(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert list(inferred_warnings(plan)) == [
        f"the split {split} will have about 14 images, fewer than 30: metrics on it are not reliable"
        for split in ("validation", "test")
    ]
    write_images(tmp_path / "images", num_images=300)
    (tmp_path / "images" / "rare").mkdir()
    for number in range(8):
        (tmp_path / "images" / "rare" / f"{number}.png").write_bytes(b"only listed")
    plan = plan_build(planned_tree(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert list(inferred_warnings(plan)) == [
        f"the split {split} will have fewer than 3 images of 1 of 4 classes (rare: about 1)"
        for split in ("validation", "test")
    ]


def test_splits_that_the_latest_version_holds_already_are_not_estimated(tmp_path: Path):
    write_images(tmp_path / "images", num_images=144)
    tree = planned_tree(tmp_path / "images", tmp_path / "dataset")
    splits = build_dataset(tree, run_id="a").manifest.splits
    plan = plan_build(tree, run_id="b")
    assert list(inferred_warnings(plan, current_version(plan))) == [
        f"the split {split} has {splits[split].num_rows} images, fewer than 30: metrics on it are not reliable"
        for split in ("validation", "test")
    ]


def test_the_same_image_under_two_classes_is_counted_and_warned_of(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    original = tmp_path / "images" / "class_0" / "00000.png"
    for copy in ("class_1/copy.png", "class_2/copy.png", "class_0/twin.png"):
        (tmp_path / "images" / copy).write_bytes(original.read_bytes())
    twins = tmp_path / "images" / "class_1" / "00001.png"
    (tmp_path / "images" / "class_1" / "twin.png").write_bytes(twins.read_bytes())
    counts = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), SMALL)).manifest.counts
    assert (counts.duplicate_content, counts.conflicting_label) == (4, 4)
    recorder = Recorder()
    tree = planned_tree(tmp_path / "images", tmp_path / "dataset")
    assert build_dataset(tree, run_id="again", observer=recorder).skipped
    warning = str(recorder.events["etl.warning"]["warning"])
    assert warning.startswith("4 accepted images have the same bytes as one of another class")
    assert "such as class_0/00000.png, class_0/twin.png, class_1/copy.png, class_2/copy.png;" in warning


def test_images_without_labels_conflict_with_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20, num_classes=1)
    folder = tmp_path / "images" / "class_0"
    (folder / "copy.png").write_bytes((folder / "00000.png").read_bytes())
    counts = open_dataset(build_here(str(folder), str(tmp_path / "dataset"), SMALL)).manifest.counts
    assert (counts.duplicate_content, counts.conflicting_label) == (1, 0)


def test_the_driver_decides_the_kernel_for_its_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "cats", num_images=4)

    def plan_with(installed: str, kernel: str) -> BuildPlan:
        for module in ("shardmill.kernel", "shardmill.images.decoder_id"):
            monkeypatch.setattr(f"{module}.NATIVE_ID", installed)
        return plan_build(planned_tree(tmp_path / "cats", tmp_path / "dataset", kernel=kernel), run_id="a")

    native, wheels = plan_with("native-7", "auto"), plan_with("", "auto")
    for plan, kernel in ((native, "native"), (wheels, "wheels")):
        assert plan.task.config.kernel == plan.build.normalize.kernel == plan.build.config["kernel"] == kernel
        assert ("native-7" in plan.build.decoder_id) == (kernel == "native")
    assert native.build.normalization_fingerprint != wheels.build.normalization_fingerprint
    assert plan_with("native-7", "wheels").digest == wheels.digest != native.digest
    # An executor (or, later, `predict`) without it, or with another one, is refused with the option to set.
    plan_with("", "wheels")
    with pytest.raises(UsageError, match=rf"kernel is missing on {socket.gethostname()}: .*etl.kernel = wheels"):
        write_unit(native.units[0], native.task)
    plan_with("native-8", "wheels")
    with pytest.raises(UsageError, match="decodes with .*native-8; the driver decodes with .*native-7; .*etl.kernel"):
        write_unit(native.units[0], native.task)
    with pytest.raises(UsageError, match="etl.kernel is native"):
        plan_with("", "native")


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
def test_executors_with_another_working_directory_read_and_write_the_same_places(tmp_path: Path, monkeypatch):
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


SOURCE = """
from etl.sources.kinds.folders import FolderSource

class Mine(FolderSource):
    def open(self, max_source_bytes):
        reader = super().open(max_source_bytes)
        reader.read = read
        return reader

def read(image):
    open(__file__ + ".read", "a").write("x")
    raise {error}

class Unlisted(FolderSource):
    def list(self):
        raise {error}
"""


def tree_of(folder: Path, kind: str = "Mine", error: str = "ValueError('no such box')", **etl: object) -> EtlTree:
    # Modules of one name would be one module for all tests.
    module = f"mysrc_{folder.name}"
    (folder / f"{module}.py").write_text(SOURCE.format(error=error))
    return EtlTree(
        source=SourceConfig(uri=str(folder / "images"), kind=f"{module}:{kind}"),
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        etl=ETL.model_copy(update={"num_workers": 1, **etl}),
        spark=SparkConfig(master="local[1]"),
    )


@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.starts("jvm"))])
@pytest.mark.starts("program")
def test_what_a_users_source_raises_in_a_unit_is_reported_with_its_line(engine: str, images: Path, monkeypatch):
    monkeypatch.chdir(images)
    with pytest.raises(UsageError, match=r"work unit \d+: ValueError: no such box \(.*/mysrc_.*\.py:12\)") as raised:
        build_dataset(tree_of(images, engine=engine), run_id="r")
    if engine == "local":
        # For --debug; and the unit did not run again.
        assert "in read_source" in "".join(traceback.format_exception(raised.value))
        assert [each.read_text() for each in images.glob("*.read")] == ["x"]


def test_what_it_raises_in_the_driver_is_reported_alike(images: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images)
    with pytest.raises(UsageError, match=r"source: ValueError: no such box \(.*/mysrc_.*\.py:12\)"):
        build_dataset(tree_of(images, image_size=0), run_id="r")
    with pytest.raises(UsageError, match=r"source: ValueError: no such box \(.*/mysrc_.*\.py:16\)"):
        build_dataset(tree_of(images, "Unlisted"), run_id="r")


@pytest.mark.starts("program")
def test_a_connection_that_its_source_loses_is_worth_another_try(images: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images)
    with pytest.raises(StorageError, match=r"ConnectionError: gone \(.*/mysrc_.*\.py:12\)"):
        build_dataset(tree_of(images, error="ConnectionError('gone')", engine="local"), run_id="r")


@pytest.mark.starts("program")
def test_what_ends_its_process_is_reported_by_how_it_ended(images: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images)
    with pytest.raises(StorageError, match="ended twice .exit status 3"):
        build_dataset(tree_of(images, error="__import__('os')._exit(3)", engine="local"), run_id="r")


def test_an_error_of_ours_blames_nobody():
    error = own_error("work unit 3", ValueError("x"))
    assert type(error) is ShardmillError and "work unit 3: ValueError: x; unexpected error" in str(error)


_CONFIG = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=8, formats=("parquet", "tfrecord"))


def build(folder: Path) -> BuildOutcome:
    """An incremental build, compared with a full one of the same images."""
    outcome = build_dataset(tree_for(folder, "dataset", etl=_CONFIG), run_id="test")
    shutil.rmtree(folder / "full", ignore_errors=True)
    full = build_dataset(tree_for(folder, "full", etl=_CONFIG), run_id="test")
    assert outcome.manifest.content_digest == full.manifest.content_digest
    return outcome


def test_a_build_continues_from_whatever_maintenance_has_left(tmp_path: Path):
    root, store = str(tmp_path / "dataset"), open_store(tmp_path / "dataset")
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path)

    # Compacted: only what was added is read.
    compact_dataset(open_dataset(root), "compacting")
    write_images(tmp_path / "images", num_images=33)
    grown = build(tmp_path)
    assert (grown.manifest.version, grown.manifest.parent_version) == (3, 2)

    # Rolled back to before they were added: they are added again.
    roll_back(store, 2, "back")
    assert open_dataset(root).manifest.counts.accepted == 30
    assert build(tmp_path).manifest.counts.accepted == 33

    # Collected: the shards that the new version carries are whole, and what has expired stays so.
    collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    (tmp_path / "images" / "class_0" / "00003.png").unlink()
    shrunk = build(tmp_path)
    assert shrunk.num_images_read == 0 and shrunk.manifest.counts.accepted == 32
    assert shrunk.manifest.has_expired(1) and not shrunk.manifest.has_expired(5)
    collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    verify_dataset(open_dataset(root), deep=True).raise_if_failed()
