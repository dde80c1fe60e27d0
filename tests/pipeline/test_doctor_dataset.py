"""The rows of `shardmill doctor` about a dataset against the ranks that would train on it, each with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlConfig
from pipeline.config import load_for_dataset, load_pipeline
from pipeline.doctor.doctor import examine
from pipeline.doctor.finding import Finding
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.lab.datasets import build_here, make_dataset, write_images
from train.config import TrainConfig
from train.planning.auto import resolve
from train.planning.preflight import check_trainable
from train.planning.row_shares import row_shares

SPLIT = "train split"


def row_of(subject: str, uri: str, workdir: Path, *overrides: str) -> Finding:
    """Of a config whose dataset is this one."""
    findings = examine(load_for_dataset(uri, overrides, str(workdir)), str(workdir))
    [found] = [each for each in findings if each.subject == subject]
    return found


@pytest.mark.starts("program")
@pytest.mark.parametrize("has_source", [False, True])
def test_the_window_budget_of_the_committed_dataset(has_source: bool, tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=60, num_classes=3)
    source = (f"source.uri={tmp_path / 'images'}",) if has_source else ()
    key = "train.reading.window_budget_bytes"
    found = row_of(key, uri, tmp_path / "work", *source)
    assert found.status == "ok" and "of 256,000,000 bytes on each rank" in found.found and f"{uri}@1" in found.found
    small = row_of(key, uri, tmp_path / "work", *source, f"{key}=1000")
    # A run's ETL goes first, and may commit a version with smaller chunks.
    assert small.status == ("warn" if has_source else "fail") and "num_workers" in small.fix
    assert "expected at most train.reading.window_budget_bytes = 1000" in small.found


@pytest.mark.starts("program")
def test_rows_and_steps_of_each_rank_are_told_of_the_dataset_and_of_the_listing(tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=60, num_classes=3, split_fractions={"train": 1, "validation": 0, "test": 0})
    # 8 streams of 7 or 8 rows, of which each step takes 2: of 3 ranks, one owns two streams and two own three.
    sizes = ("train.global_batch_size=16", "train.num_streams=8", "train.num_workers=3", "train.launcher=local")
    shares = "60 rows, 4 steps an epoch of train.global_batch_size = 16; 15 to 23 rows for each of 3 ranks"
    found = row_of(SPLIT, uri, tmp_path / "work", *sizes)
    assert found.status == "ok" and found.found.startswith(f"{uri}@1: {shares}, which own train.num_streams = 8")
    images = str(tmp_path / "images")
    for fraction, about in ("1", shares), ("0.8", "about 48 rows, 3 steps"):
        splits = f"etl.split_fractions={{train={fraction}, validation={1 - float(fraction):.1f}, test=0.0}}"
        rows = {each.subject: each for each in examine(load_pipeline(images, (*sizes, splits), "work"), str(tmp_path))}
        listed = rows[f"source: {SPLIT}"]
        assert listed.status == "ok" and listed.found.startswith(about), listed


@pytest.mark.starts("program")
def test_a_dataset_without_a_train_split_is_refused(tmp_path: Path):
    splits = {"train": 0, "validation": 0, "test": 1}
    uri = make_dataset(tmp_path, num_images=20, split_fractions=splits)
    found = row_of(SPLIT, uri, tmp_path / "work")
    assert found.status == "fail" and f"{uri}@1 has no train split; it has test" in found.found
    assert "raise etl.split_fractions.train" in found.fix

    # With a source it is the listing that counts: a build would make another version first.
    again = ("etl.split_fractions={train=0, validation=0, test=1}", f"dataset.uri={uri}")
    rows = {each.subject: each for each in examine(load_pipeline(str(tmp_path / "images"), again, "work"), "work")}
    assert rows[SPLIT].status == "warn" and "has no train split" in rows[SPLIT].found
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "fail" and "0 rows" in listed.found and "raise etl.split_fractions.train" in listed.fix


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        ("train.loss=sigmoid", "train.loss = 'sigmoid', but the dataset has 3 classes", 'set train.loss = "auto"'),
        ("train.class_weights={clas_1=2.0}", "'clas_1'; expected classes of the dataset", "did you mean 'class_1'"),
    ],
)
def test_labels_that_the_training_cannot_take_are_refused(override: str, said: str, fix: str, tmp_path: Path):
    found = row_of(SPLIT, make_dataset(tmp_path, num_images=30), tmp_path / "work", override)
    assert found.status == "fail" and said in found.found and fix in found.fix + found.found


@pytest.mark.starts("program")
def test_images_without_labels_are_refused(tmp_path: Path):
    one_class = make_dataset(tmp_path, num_images=20, num_classes=1)
    flat = build_here(str(tmp_path / "images" / "class_0"), str(tmp_path / "flat"), EtlConfig(image_size=16))
    for uri, said, fix in (
        (one_class, "1 class(es); expected at least 2", "add images of another"),
        (flat, "has no labels", "sort the images into class folders"),
    ):
        found = row_of(SPLIT, uri, tmp_path / "work")
        assert found.status == "fail" and said in found.found and fix in found.fix


@pytest.mark.starts("program")
def test_more_ranks_than_streams_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri, eight = make_dataset(tmp_path, num_images=30), "train.num_streams=8"
    found = row_of("train.num_workers", uri, tmp_path / "work", eight, "train.num_workers=9")
    assert found.status == "fail" and "train.num_workers = 9 for train.num_streams = 8" in found.found
    # The number that others have started is in no config.
    for name, value in (("RANK", 0), ("WORLD_SIZE", 9), ("LOCAL_WORLD_SIZE", 9), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    found = row_of(SPLIT, uri, tmp_path / "work", eight, "train.launcher=attach", "train.strategy=horovod")
    assert found.status == "fail" and "train.num_workers = 9 for train.num_streams = 8" in found.found
    assert "set train.num_workers = 8 or less" in found.fix


@pytest.mark.starts("program")
def test_fewer_rows_than_ranks_are_refused(tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=6, split_fractions={"train": 1, "validation": 0, "test": 0})
    how = ("train.num_workers=8", "train.launcher=local")
    found = row_of(SPLIT, uri, tmp_path / "work", *how)
    said = "a train split of 6 rows for 8 ranks: rank 0 gets none"
    assert found.status == "fail" and said in found.found and "set train.num_workers to 6 or less" in found.fix
    # So is the training.
    dataset = open_dataset(uri)
    with pytest.raises(UsageError, match=r"6 rows for 8 ranks"):
        check_trainable(resolve(TrainConfig(num_workers=8), SparkConfig()).config, dataset)
    rows = {each.subject: each for each in examine(load_pipeline(str(tmp_path / "images"), how, "work"), str(tmp_path))}
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "fail" and said in listed.found, "all six images are too few, whatever the splits get"


@pytest.mark.starts("program")
def test_an_estimate_that_is_too_small_is_a_warning(tmp_path: Path):
    write_images(tmp_path / "images", num_images=10, num_classes=2)
    how = ("train.num_workers=6", "train.num_streams=6", "train.global_batch_size=6", "train.launcher=local")
    splits = "etl.split_fractions={train=0.5, validation=0.5, test=0.0}"
    tree = load_pipeline(str(tmp_path / "images"), (*how, splits), str(tmp_path / "work"))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "warn" and listed.found.startswith("about a train split of 5 rows for 6 ranks")


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "num_streams", "expected"),
    [(3, 2, 8, (1, 2)), (8, 8, 8, (1,) * 8), (10, 1, 4, (10,)), (100, 3, 6, (33, 33, 34))],
)
def test_all_rows_are_shared_out(num_rows: int, num_ranks: int, num_streams: int, expected: tuple[int, ...]):
    config = TrainConfig(num_workers=num_ranks, num_streams=num_streams, global_batch_size=num_streams * 2)
    assert row_shares(config, num_rows).rows_of_ranks == expected
