"""Before a unit runs: one dataset follows one source, and what was inferred of it is said."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from etl.checks.facts import emptied_splits, inferred_facts, inferred_warnings
from etl.checks.version_warnings import version_warnings
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build
from etl.units.write_unit import write_unit
from shardmill.dataset.open import open_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from tests.etl.building import Recorder
from tests.lab.datasets import HERE, build_here, write_images

ETL = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=20)


def tree_for(source: Path, dataset: Path, **etl: object) -> EtlTree:
    config = ETL.model_copy(update=etl)
    return EtlTree(source=SourceConfig(uri=str(source)), dataset=DatasetConfig(uri=str(dataset)), etl=config)


def test_a_second_source_does_not_replace_the_first_ones_images(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    write_images(tmp_path / "cars", num_images=40, seed=1)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    with pytest.raises(UsageError, match=f"was built from {tmp_path}/cats, not from {tmp_path}/cars") as caught:
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


def test_a_copied_source_replaces_the_first_one_for_good(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    write_images(tmp_path / "copy", num_images=40)
    tree = tree_for(tmp_path / "copy", tmp_path / "dataset")
    plan = plan_build(tree, run_id="b")
    for unit in plan.units:
        write_unit(unit, plan.task)
    replaced = build_dataset(tree, run_id="b", replace_source=True)
    assert (replaced.manifest.version, replaced.manifest.source.uri) == (2, str(tmp_path / "copy"))
    assert build_dataset(tree, run_id="c").skipped


def test_a_commit_that_was_interrupted_is_remembered_by_the_next_build(tmp_path: Path):
    write_images(tmp_path / "cats", num_images=40)
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    remembered = tmp_path / "dataset" / "committed" / "00000001.json"
    before = remembered.read_bytes()
    remembered.unlink()
    assert build_dataset(tree_for(tmp_path / "cats", tmp_path / "dataset"), run_id="b").skipped
    assert remembered.read_bytes() == before
    remembered.unlink()
    build_here(str(tmp_path / "cats"), str(tmp_path / "dataset"), ETL)
    assert remembered.read_bytes() == before


def test_a_small_split_without_a_class_is_warned_of_when_it_is_made(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=30)
    write_images(tmp_path / "images" / "test", num_images=4, num_classes=1)
    root = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)
    [warning] = version_warnings(open_store(root), open_dataset(root).manifest)
    assert warning.startswith(
        "the split test has no image of 2 of 3 classes (class_1, class_2): add images, or set etl."
    )


def test_a_split_that_the_content_hashes_left_empty_is_warned_of(tmp_path: Path):
    write_images(tmp_path / "images", num_images=12)
    plan = plan_build(tree_for(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)
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
    plan = plan_build(tree_for(tmp_path / "images", tmp_path / "dataset"), run_id="a")
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
    plan = plan_build(tree_for(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert inferred_facts(plan)["splits"] == "by content hash, about train 240, validation 30, test 30"
    assert list(inferred_warnings(plan)) == []


def test_planned_splits_that_are_small_or_lack_a_class_are_warned_of_before_any_work(tmp_path: Path):
    write_images(tmp_path / "images", num_images=144)
    plan = plan_build(tree_for(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert list(inferred_warnings(plan)) == [
        f"the split {split} will have about 14 images, fewer than 30: metrics on it are not reliable"
        for split in ("validation", "test")
    ]
    write_images(tmp_path / "images", num_images=300)
    (tmp_path / "images" / "rare").mkdir()
    for number in range(8):
        (tmp_path / "images" / "rare" / f"{number}.png").write_bytes(b"only listed")
    plan = plan_build(tree_for(tmp_path / "images", tmp_path / "dataset"), run_id="a")
    assert list(inferred_warnings(plan)) == [
        f"the split {split} will have fewer than 3 images of 1 of 4 classes (rare: about 1)"
        for split in ("validation", "test")
    ]


def test_the_same_image_under_two_classes_is_counted_and_warned_of(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    original = tmp_path / "images" / "class_0" / "00000.png"
    for copy in ("class_1/copy.png", "class_2/copy.png", "class_0/twin.png"):
        (tmp_path / "images" / copy).write_bytes(original.read_bytes())
    twins = tmp_path / "images" / "class_1" / "00001.png"
    (tmp_path / "images" / "class_1" / "twin.png").write_bytes(twins.read_bytes())
    counts = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)).manifest.counts
    assert (counts.duplicate_content, counts.conflicting_label) == (4, 4)
    recorder = Recorder()
    tree = tree_for(tmp_path / "images", tmp_path / "dataset")
    assert build_dataset(tree, run_id="again", observer=recorder).skipped
    warning = str(recorder.events["etl.warning"]["warning"])
    assert warning.startswith("4 accepted images have the same bytes as one of another class")
    assert "such as class_0/00000.png, class_0/twin.png, class_1/copy.png, class_2/copy.png;" in warning


def test_images_without_labels_conflict_with_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20, num_classes=1)
    folder = tmp_path / "images" / "class_0"
    (folder / "copy.png").write_bytes((folder / "00000.png").read_bytes())
    counts = open_dataset(build_here(str(folder), str(tmp_path / "dataset"), ETL)).manifest.counts
    assert (counts.duplicate_content, counts.conflicting_label) == (1, 0)


def test_the_driver_decides_the_kernel_for_its_executors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "cats", num_images=4)

    def plan_with(installed: str, kernel: str) -> BuildPlan:
        for module in ("shardmill.kernel", "shardmill.images.decoder_id"):
            monkeypatch.setattr(f"{module}.NATIVE_ID", installed)
        return plan_build(tree_for(tmp_path / "cats", tmp_path / "dataset", kernel=kernel), run_id="a")

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
