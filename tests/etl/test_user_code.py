"""A user's own source that fails: every engine reports its error with the line, and blames no image."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.user_code import own_error
from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig, SparkConfig
from tests.etl.building import ETL

SOURCE = """
from etl.sources.folders import FolderSource

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
def test_what_a_users_source_raises_in_a_unit_is_told_with_its_line(
    engine: str, images: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(images)
    with pytest.raises(UsageError, match=r"work unit \d+: ValueError: no such box \(.*/mysrc_.*\.py:12\)") as raised:
        build_dataset(tree_of(images, engine=engine), run_id="r")
    if engine == "local":
        # For --debug; and the unit did not run again.
        assert "in read_source" in "".join(traceback.format_exception(raised.value))
        assert [each.read_text() for each in images.glob("*.read")] == ["x"]


def test_what_it_raises_in_the_driver_is_told_alike(images: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_what_ends_its_process_is_told_by_how_it_ended(images: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(images)
    with pytest.raises(StorageError, match="ended twice .exit status 3"):
        build_dataset(tree_of(images, error="__import__('os')._exit(3)", engine="local"), run_id="r")


def test_an_error_of_ours_blames_nobody():
    error = own_error("work unit 3", ValueError("x"))
    assert type(error) is ShardmillError and "work unit 3: ValueError: x; unexpected error" in str(error)
