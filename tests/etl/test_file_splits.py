"""Splits that the names of files say: the word that tells the files apart, never a word of the subject."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from etl.sources.file_splits import splits_of
from shardmill.errors import UsageError
from tests.etl.building import images_of, list_images
from tests.etl.source_files import picture, write_tar

TRAIN, VALIDATION, TEST = "train", "validation", "test"


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["set-train-00000.tar", "set-val-00000.tar", "set-test-00000.tar"], [TRAIN, VALIDATION, TEST]),
        (["test_tube-train-0.tar", "test_tube-val-0.tar"], [TRAIN, VALIDATION]),
        (["test_tube-train-0.tar", "test_tube-val-0.tar", "test_tube-test-0.tar"], [TRAIN, VALIDATION, TEST]),
        (["test_tube-train-0.tar", "beaker-val-0.tar"], [TRAIN, VALIDATION]),
        (["train-test_tube-0.tar", "val-beaker-0.tar"], [TRAIN, VALIDATION]),
        (["train-test_tube.tar", "val-test_tube.tar"], [TRAIN, VALIDATION]),
        (["train_test_split-train.tar", "train_test_split-test.tar"], [TRAIN, TEST]),
        (["train/test_tube.tar", "val/test_tube.tar", "test/test_tube.tar"], [TRAIN, VALIDATION, TEST]),
        (["dev-kit/train/0.tar", "dev-kit/test/0.tar"], [TRAIN, TEST]),
        (["dev/train-0.tar", "dev/val-0.tar"], [TRAIN, VALIDATION]),
        (["test_tube-train-0.tar", "test_tube-train-1.tar"], [TRAIN, TRAIN]),
        (["a-train-0.tar", "a-train-1.tar"], [TRAIN, TRAIN]),
        (["x-test_tube_train.tar", "test_tube_val-0-of-1.tar"], [TRAIN, VALIDATION]),
        (["TRAIN.tar", "Valid.tar"], [TRAIN, VALIDATION]),
    ],
    ids=str,
)
def test_the_word_that_differs_is_the_split(names: list[str], splits: list[str]):
    found = splits_of(names)
    assert [found.of[name] for name in names] == splits and not found.look_alikes


@pytest.mark.parametrize(
    "names", [["test_tube-train-0.tar", "test_tube-0.tar"], ["train-0.tar", "more-0.tar"]], ids=str
)
def test_files_without_a_split_beside_others_are_refused(names: list[str]):
    with pytest.raises(UsageError, match="names a split, but .* does not"):
        splits_of(names)


def test_names_that_tell_nothing_apart_are_refused():
    with pytest.raises(UsageError, match=r"train_test-a\.tar names the splits test and train"):
        splits_of(["train_test-a.tar", "test_train-b.tar"])


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["val-0.tar", "test-0.tar"], ("test", "val")),
        (["train2017.tar", "val2017.tar"], ("train2017", "val2017")),
        (["x-trainset-0.tar", "x-testset-0.tar"], ("testset", "trainset")),
        (["images-0.tar", "images-1.tar", "latest.tar", "training2.tar"], ()),
    ],
    ids=str,
)
def test_names_that_only_look_like_splits_are_reported(names: list[str], alike: tuple[str, ...], tmp_path: Path):
    assert splits_of(names).look_alikes == alike
    for number, name in enumerate(names):
        write_tar(tmp_path / name, {f"{number}.png": picture(number), f"{number}.cls": b"1"})
    warnings = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset")).warnings
    assert [f"not recognized ({', '.join(alike)})" in each for each in warnings] == ([True] if alike else [])


def test_folders_or_a_column_that_say_the_splits_end_the_doubt(tmp_path: Path):
    write_tar(tmp_path / "val.tar", {f"{split}/c/{split}.png": picture(1) for split in ("train", "test")})
    assert not list_images(SourceConfig(uri=str(tmp_path), kind="webdataset")).warnings
    pq.write_table(pa.table({"image": [picture(1)], "split": ["train"]}), tmp_path / "test.parquet")
    assert not list_images(SourceConfig(uri=str(tmp_path), kind="parquet")).warnings
    pq.write_table(pa.table({"image": [picture(1)]}), tmp_path / "test.parquet")
    [warning] = list_images(SourceConfig(uri=str(tmp_path), kind="parquet")).warnings
    assert "(test)" in warning


def test_tables_for_splits_without_a_column_are_reported(tmp_path: Path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"uri,label\n{name}.jpg,x\n")
    source = SourceConfig(uri=str(tmp_path), kind="table")
    [warning] = list_images(source).warnings
    assert "(test, train)" in warning and all(image.split is None for image in images_of(list_images(source)))
    assert not list_images(source.model_copy(update={"uri": str(tmp_path / "train.csv")})).warnings
