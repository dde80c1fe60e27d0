"""Inputs with equal bytes are counted, dropped but for one, or end the build, as the config says."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING, Observer
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.etl.building import ETL, Recorder
from tests.lab.datasets import HERE, write_images

_COPIES = ("class_0/a_copy.png", "class_1/z_copy.png", "class_2/z_copy.png")


def build(
    folder: Path, dataset: str, duplicates: str, source: SourceConfig | None = None, observer: Observer | None = None
) -> BuildOutcome:
    etl = ETL.model_copy(update={"engine": HERE, "duplicates": duplicates})
    source = source or SourceConfig(uri=str(folder / "images"))
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / dataset)), etl=etl)
    return build_dataset(tree, run_id=uuid.uuid4().hex, observer=observer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", num_images=60)
    for name in _COPIES:
        shutil.copy(tmp_path / "images" / "class_0" / "00003.png", tmp_path / "images" / name)
    return tmp_path


def test_the_smallest_key_stays_and_the_rest_is_as_if_the_others_had_never_been(folder: Path):
    dropped = build(folder, "dropped", "drop").manifest
    assert dropped.counts.by_reason == {"duplicate_content": 3}
    assert (dropped.counts.listed, dropped.counts.accepted, dropped.counts.duplicate_content) == (63, 60, 0)
    verify_dataset(open_dataset(str(folder / "dropped")), deep=True).raise_if_failed()
    # "00003.png" sorts before the copies.
    for name in _COPIES:
        (folder / "images" / name).unlink()
    assert build(folder, "without", "report").manifest.content_digest == dropped.content_digest


def test_a_copy_comes_back_once_its_original_is_gone(folder: Path):
    build(folder, "dataset", "drop")
    assert build(folder, "dataset", "drop").skipped
    (folder / "images" / "class_0" / "00003.png").unlink()
    manifest = build(folder, "dataset", "drop").manifest
    assert (manifest.operation, manifest.counts.accepted) == ("incremental", 60)
    assert manifest.content_digest == build(folder, "whole", "drop").manifest.content_digest
    verify_dataset(open_dataset(str(folder / "dataset")), deep=True).raise_if_failed()


def test_an_error_publishes_nothing_and_names_them(folder: Path):
    with pytest.raises(RejectLimitExceeded, match=r"3 inputs .* same bytes .* class_0/a_copy.png = class_0/00003"):
        build(folder, "dataset", "error")
    assert latest_version(open_store(folder / "dataset")) == 0
    for name in _COPIES:
        (folder / "images" / name).unlink()
    assert build(folder, "dataset", "error").published


def write_table(folder: Path, column: str, value_of: Callable[[str], str]) -> SourceConfig:
    """A table of all images with one more column."""
    names = sorted(str(file.relative_to(folder / "images")) for file in (folder / "images").rglob("*.png"))
    lines = [f"uri,label,{column}", *(f"{name},{name.split('/')[0]},{value_of(name)}" for name in names)]
    (folder / "images" / "table.csv").write_text("\n".join(lines))
    return SourceConfig(uri=str(folder / "images" / "table.csv"), kind="table")


def by_folder(folder: Path) -> SourceConfig:
    for split in ("train", "test"):
        shutil.copytree(folder / "images", folder / "split" / split, ignore=shutil.ignore_patterns("*.csv"))
    for file in (folder / "split" / "test").rglob("*.png"):
        if str(file.relative_to(folder / "split" / "test")) not in _COPIES:
            file.unlink()
    for name in _COPIES:
        (folder / "split" / "train" / name).unlink()
    return SourceConfig(uri=str(folder / "split"))


_NAMED_SPLITS: dict[str, Callable[[Path], SourceConfig]] = {
    "split column": lambda folder: write_table(folder, "split", lambda name: "test" if name in _COPIES else "train"),
    "group column": lambda folder: write_table(folder, "group", lambda name: f"patient of {name}"),
    "split folders": by_folder,
}


@pytest.mark.parametrize("how", _NAMED_SPLITS)
def test_equal_bytes_in_two_splits_are_counted_and_warned_of(how: str, folder: Path):
    source, recorder = _NAMED_SPLITS[how](folder), Recorder()
    manifest = build(folder, "dataset", "report", source, recorder).manifest
    dataset = open_dataset(str(folder / "dataset"))
    # The original and its three copies, or none.
    splits = {
        sample.source: split
        for split, info in manifest.splits.items()
        for sample in read_samples(dataset, split, info.num_rows)
        if sample.source.endswith(("class_0/00003.png", *_COPIES))
    }
    assert len(splits) == 4 and len(set(splits.values())) > 1
    assert (manifest.counts.duplicate_content, manifest.counts.leaked_content) == (3, 4)
    warning = str(recorder.events["etl.warning"][WARNING])
    assert warning.startswith("4 accepted images have the same bytes as one in another split, such as ")
    firsts = [next(name for name in sorted(splits) if splits[name] == split) for split in set(splits.values())]
    assert f"such as {', '.join(f'{name} ({splits[name]})' for name in sorted(firsts))};" in warning
    verify_dataset(dataset, deep=True).raise_if_failed()
    # One of them stays, so nothing leaks; and contents alone never put them into two splits.
    assert build(folder, "dropped", "drop", source).manifest.counts.leaked_content == 0
    assert build(folder, "by_content", "report").manifest.counts.leaked_content == 0
