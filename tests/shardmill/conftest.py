"""Datasets that the tests of the library read, and one that they may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardmill
from tests.lab.datasets import SharedDatasets


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    """120 images in 3 classes, so that the last batch of its train split is padded."""
    return shardmill.open_dataset(f"{shared_dataset()}@1")


@pytest.fixture(scope="session")
def whole(shared_dataset: SharedDatasets) -> Path:
    """60 images; only read."""
    return Path(shared_dataset(num_images=60))


@pytest.fixture
def dataset_root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "dataset"))
