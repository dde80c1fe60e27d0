"""Corrected labels: a table of keys and classes changes those rows alone, and one that is wrong is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.checks.facts import inferred_warnings
from etl.config import SourceConfig
from etl.plan import plan_build
from shardmill.cells import to_cell
from shardmill.errors import UsageError
from shardmill.loader.metadata import read_metadata
from tests.etl.building import Recorder
from tests.etl.incremental import build, opened, tree_for
from tests.lab.datasets import write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder that holds `images`: 60 of three classes."""
    write_images(tmp_path / "images", num_images=60)
    return tmp_path


def write(folder: Path, text: str, name: str = "fixed.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def classes(folder: Path, dataset: str = "dataset") -> dict[str, str]:
    version = opened(folder, dataset)
    tables = [read_metadata(version, split, ("source", "class_name")) for split in version.manifest.splits]
    return {row["source"]: row["class_name"] for table in tables for row in table.to_pylist()}


def test_only_corrected_rows_are_read_again(images: Path):
    build(images)
    before = classes(images)
    # Of three rows one is not filled in; an editor may have put other columns beside them.
    given = write(
        images,
        "source,note,label\nclass_0/00000.png,x,class_1\nclass_1/00001.png,,\nclass_2/00002.png,y,class_0\n",
    )
    recorder = Recorder()
    second = build(images, recorder=recorder, corrections=given)
    assert (second.manifest.operation, second.num_images_read) == ("incremental", 2)
    assert recorder.events["etl.corrected"] == {"labels": 2, "rows": 2}
    changed = {"class_0/00000.png": "class_1", "class_2/00002.png": "class_0"}
    assert classes(images) == before | changed
    assert build(images, corrections=given).skipped
    assert build(images, "whole", corrections=given).manifest.content_digest == second.manifest.content_digest

    # The file is edited, and then left out.
    write(images, "source,label\nclass_0/00000.png,class_2\n")
    assert build(images, corrections=given).num_images_read == 2
    assert classes(images) == before | {"class_0/00000.png": "class_2"}
    other = write(images, "source,label\nclass_1/00001.png,class_0\n", "other.csv")
    for table, said in (
        ("", "not set any more, without 1 label of"),
        (other, "other.csv' does not have 1 label of"),
        ("", "a table that cannot be read now"),
    ):
        if "read" in said:
            Path(given).unlink()
        warnings = [*inferred_warnings(plan_build(tree_for(images, corrections=table), run_id="r"))]
        assert sum(said in each and "with which version 3 was built" in each for each in warnings) == 1
    last = build(images)
    assert (last.num_images_read, classes(images)) == (1, before)


def test_keys_of_archives_and_other_formats_of_tables(images: Path):
    with zipfile.ZipFile(images / "images.zip", "w") as archive:
        for file in sorted((images / "images").rglob("*.png")):
            archive.write(file, file.relative_to(images / "images"))
    key = "images.zip\0class_0/00000.png"
    pq.write_table(pa.table({"source": [to_cell(key)], "label": ["class_2"]}), images / "fixed.parquet")
    source = SourceConfig(uri=str(images / "images.zip"), kind="zip")
    tree = tree_for(images, corrections=str(images / "fixed.parquet")).model_copy(update={"source": source})
    plan = plan_build(tree, run_id="r")
    counts = {label: times for (_, label), times in plan.listing.images_by_label.items()}
    assert counts == {"class_0": 19, "class_1": 20, "class_2": 21} and not plan.listing.warnings
    write(images, '{"source": "class_1/00001.png", "label": "class_0"}\n', "fixed.jsonl")
    plan = plan_build(tree_for(images, corrections=str(images / "fixed.jsonl"), stratified_splits=True), run_id="r")
    assert sum(times for (_, label), times in plan.listing.images_by_label.items() if label == "class_0") == 21


def test_an_image_that_is_not_there_is_a_warning_and_no_image_an_error(images: Path):
    given = write(images, "source,label\nclass_0/00000.png,class_1\ngone.png,class_1\n")
    [warning] = plan_build(tree_for(images, corrections=given), run_id="r").listing.warnings
    assert "fixed.csv' names 1 image that" in warning and warning.endswith("does not have: gone.png")
    write(images, "source,label\nimages/a.png,class_1\nimages/b.png,class_0\n")
    with pytest.raises(UsageError, match=r"names only 2 images that .* does not have: images/a.png, images/b.png"):
        plan_build(tree_for(images, corrections=given), run_id="r")
    write(images, "source,label\nclass_0/00000.png,\n")
    [warning] = plan_build(tree_for(images, corrections=given), run_id="r").listing.warnings
    assert "corrects nothing: its column label is empty" in warning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("key,label\na,b\n", "has no column 'source', only 'key', 'label'"),
        ("source,label\nclass_0/00000.png\n", "row 1: 1 values, expected 2"),
        ("source,label\nclass_0/00000.png,class1\n", "the label 'class1'.*did you mean 'class_1'"),
        ("source,label\na,class_0\na,class_1\n", "gives a the labels 'class_0' and 'class_1'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(images: Path, text: str | None, says: str):
    given = str(images / "fixed.csv") if text is None else write(images, text)
    with pytest.raises(UsageError, match=says):
        plan_build(tree_for(images, corrections=given), run_id="r")


def test_a_class_without_images_needs_a_label_map(images: Path):
    given = write(images, "source,label\nclass_0/00000.png,class_3\n")
    names = ("class_0", "class_1", "class_2", "class_3")
    plan = plan_build(tree_for(images, corrections=given, label_map=names), run_id="r")
    assert plan.listing.images_by_label[None, "class_3"] == 1
    with pytest.raises(UsageError, match="name all classes in etl.label_map"):
        plan_build(tree_for(images, corrections=given), run_id="r")


def test_labels_that_are_no_classes_are_not_corrected(images: Path):
    given = write(images, "source,label\nclass_0/00000.png,class_3\n")
    source = SourceConfig(uri=str(images / "images"), label_kind="none")
    tree = tree_for(images, corrections=given).model_copy(update={"source": source})
    with pytest.raises(UsageError, match="source.label_kind is none; expected images with one class each"):
        plan_build(tree, run_id="r")
