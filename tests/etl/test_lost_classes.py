"""A class that has lost its last image keeps its number, and content digests are those of a full build all the same."""

from __future__ import annotations

import csv
import json
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import collect_garbage
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.verify import verify_dataset
from shardmill.stores import open_store
from tests.etl.incremental import build, opened, paint, tree_for
from tests.lab.datasets import write_images


def rename_class(images: Path) -> None:
    shutil.move(images / "class_1", images / "zebra")


def rename_to_sort_first(images: Path) -> None:
    shutil.move(images / "class_1", images / "aardvark")


def merge_classes(images: Path) -> None:
    for file in (images / "class_1").iterdir():
        shutil.move(file, images / "class_0" / f"moved_{file.name}")


def delete_class(images: Path) -> None:
    shutil.rmtree(images / "class_1")


def spoil_class(images: Path) -> None:
    for file in (images / "class_1").iterdir():
        file.write_bytes(b"<html>not found</html>")


def lose_and_gain(images: Path) -> None:
    shutil.rmtree(images / "class_0")
    for number in range(4):
        paint(images / "aardvark" / f"{number}.png", random.Random(number))


CHANGES = [rename_class, rename_to_sort_first, merge_classes, delete_class, spoil_class, lose_and_gain]


def same_as_full(folder: Path, grown: Manifest) -> None:
    whole = build(folder, f"whole_{uuid.uuid4().hex[:8]}").manifest
    assert grown.content_digest == whole.content_digest
    assert (grown.counts, grown.ledger_digest, grown.channel_sums) == (
        whole.counts, whole.ledger_digest, whole.channel_sums
    )  # fmt: skip
    verify_dataset(opened(folder), deep=True).raise_if_failed()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_class_has_lost_its_images_this_and_every_later_version_equals_a_full_build(
    tmp_path: Path, change: Callable[[Path], None]
):
    write_images(tmp_path / "images", num_images=60)
    first = build(tmp_path).manifest
    change(tmp_path / "images")
    outcome = build(tmp_path)
    assert outcome.manifest.operation == "incremental"
    # No class has another number than before.
    assert outcome.manifest.class_names[:3] == first.class_names
    assert outcome.manifest.empty_classes
    same_as_full(tmp_path, outcome.manifest)
    assert build(tmp_path).skipped

    paint(tmp_path / "images" / "class_2" / "later.png", random.Random(1))
    later = build(tmp_path).manifest
    assert (later.version, later.operation) == (3, "incremental")
    same_as_full(tmp_path, later)

    # The images that come back find their class again.
    paint(tmp_path / "images" / later.empty_classes[0] / "back.png", random.Random(2))
    back = build(tmp_path).manifest
    assert back.class_names == later.class_names
    same_as_full(tmp_path, back)


def test_versions_made_of_such_a_version_keep_its_content_digest(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    rename_to_sort_first(tmp_path / "images")
    lost = build(tmp_path).manifest
    store = open_store(tmp_path / "dataset")
    compacted = compact_dataset(opened(tmp_path), "compacting")
    assert compacted.num_rows_copied and compacted.manifest.content_digest == lost.content_digest
    paint(tmp_path / "images" / "class_0" / "later.png", random.Random(1))
    build(tmp_path)
    again = roll_back(store, lost.version, "back").manifest
    assert again.content_digest == lost.content_digest
    assert collect_garbage(store, Retention(1, older_than_seconds=0.0), "gc").expired
    assert opened(tmp_path).manifest.content_digest == lost.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()
    same_as_full(tmp_path, build(tmp_path).manifest)


def test_a_class_of_a_split_that_is_gone_counts_no_more(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=40, num_classes=2)
    write_images(tmp_path / "images" / "test", num_images=9, num_classes=3, seed=1)
    assert len(build(tmp_path).manifest.class_names) == 3
    shutil.rmtree(tmp_path / "images" / "test" / "class_2")
    lost = build(tmp_path).manifest
    assert lost.empty_classes == ("class_2",)
    same_as_full(tmp_path, lost)
    shutil.rmtree(tmp_path / "images" / "test")
    same_as_full(tmp_path, build(tmp_path).manifest)


def test_an_appended_source_equals_a_full_build_of_both(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    delete_class(tmp_path / "images")
    build(tmp_path)
    rng = random.Random(3)
    for number in range(20):
        paint(tmp_path / "tuesday" / f"a_new_class_{number % 2}" / f"{number}.png", rng)
    tree = tree_for(tmp_path, write_mode="append")
    tree = tree.model_copy(update={"source": SourceConfig(uri=str(tmp_path / "tuesday"))})
    appended = build_dataset(tree, run_id="append").manifest
    assert appended.operation == "append"
    shutil.copytree(tmp_path / "tuesday", tmp_path / "images", dirs_exist_ok=True)
    same_as_full(tmp_path, appended)


def test_a_class_of_several_that_no_row_has_any_more(tmp_path: Path):
    (tmp_path / "images").mkdir()
    for number in range(40):
        paint(tmp_path / "images" / f"{number:03d}.png", random.Random(number))

    def build_table(dataset: str, names: dict[int, list[str]]) -> BuildOutcome:
        with open(tmp_path / "images" / "table.csv", "w", newline="") as out:
            rows = [(f"{number:03d}.png", json.dumps(labels)) for number, labels in names.items()]
            csv.writer(out).writerows([("uri", "label"), *rows])
        source = SourceConfig(uri=str(tmp_path / "images" / "table.csv"), kind="table", label_kind="multi_label")
        tree = tree_for(tmp_path, dataset).model_copy(update={"source": source})
        return build_dataset(tree, run_id=uuid.uuid4().hex)

    labels = {number: ["night", "sky"] if number % 2 else ["night"] for number in range(40)}
    build_table("dataset", {**labels, 7: ["dog", "sky"]})
    labels[7] = ["cat", "sky"]
    grown = build_table("dataset", labels).manifest
    assert (grown.operation, grown.empty_classes) == ("incremental", ("dog",))
    assert grown.content_digest == build_table("whole", labels).manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_a_layout_tells_label_maps_apart_that_give_its_classes_other_numbers(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30, num_classes=2)
    maps = [
        ("class_0", "class_1"),
        ("class_1", "class_0"),
        ("class_0", "between", "class_1"),
        ("class_0", "class_1", "x"),
    ]
    manifests = [build(tmp_path, f"dataset_{place}", label_map=names).manifest for place, names in enumerate(maps)]
    assert len({each.content_digest for each in manifests}) == 1
    assert len({each.layout_digest for each in manifests}) == len(maps)
    assert build(tmp_path, "found").manifest.layout_digest == manifests[0].layout_digest
