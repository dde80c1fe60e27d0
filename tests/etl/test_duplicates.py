"""Inputs with equal bytes are counted, dropped but for one, or end the build, as the config says."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from tests.etl.building import ETL
from tests.support import write_images

_COPIES = ("class_0/a_copy.png", "class_1/z_copy.png", "class_2/z_copy.png")


def build(folder: Path, dataset: str, duplicates: str) -> BuildOutcome:
    etl = ETL.model_copy(update={"engine": "tests.extending_entries:NEW_ENGINE", "duplicates": duplicates})
    tree = EtlTree(
        source=SourceConfig(uri=str(folder / "images")), dataset=DatasetConfig(uri=str(folder / dataset)), etl=etl
    )
    return build_dataset(tree, run_id=uuid.uuid4().hex)


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
