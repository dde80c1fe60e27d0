"""Patterns of file names: lists, ranges, and paths that only look like patterns."""

from __future__ import annotations

import itertools
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources.containers import Containers
from etl.sources.names import expanded, is_pattern, matches
from shardmill.errors import UsageError
from shardmill.storage import StoredFile
from shardmill.stores.local import LocalStore
from tests.etl.building import list_images
from tests.lab.datasets import write_images


def test_braces_name_the_files_that_they_match():
    pattern = "{train,{val,dev}}-{08..11}/{a,b}.tar"
    names = [
        f"{split}-{n:02d}/{x}.tar" for split, n, x in itertools.product(("train", "val", "dev"), range(8, 12), "ab")
    ]
    assert sorted(expanded(pattern)) == sorted(names)
    assert is_pattern(pattern) and all(matches(name, pattern) for name in names)
    for other in ("test-08/a.tar", "train-07/a.tar", "train-8/a.tar", "train-08/c.tar", "train-08/x/a.tar"):
        assert not matches(other, pattern)
    # One word in braces is a name.
    assert not is_pattern("{train}.tar") and list(expanded("{train}.tar")) == ["{train}.tar"]
    assert matches("val-3.tar", "{train,val}-*.tar")


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """`set [1]/{t,u,v}.tar`, each with six images."""
    write_images(tmp_path / "images", num_images=6)
    folder = tmp_path / "set [1]"
    folder.mkdir()
    for name in "tuv":
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            archive.add(tmp_path / "images", ".")
    return folder


@pytest.mark.parametrize("name, num_archives", [("", 3), ("t.tar", 1), ("{t,u}.tar", 2), ("[uv].tar", 2), ("*.tar", 3)])
def test_a_local_path_that_is_there_is_no_pattern(name: str, num_archives: int, archives: Path):
    listing = list_images(SourceConfig(uri=f"{archives}/{name}", kind="webdataset"), max_source_bytes=10_000)
    assert listing.num_images == 6 * num_archives


def test_every_file_of_a_list_has_to_be_there(archives: Path):
    with pytest.raises(UsageError, match=r"1 of the files that it names do not exist, such as w.tar"):
        list_images(SourceConfig(uri=f"{archives}/{{t,w}}.tar", kind="webdataset"))


def test_a_file_that_was_seen_is_asked_for_again_and_not_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An image of a table that is not there asks for the tables; that must not list a bucket each time."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("uri\n")
    tables = Containers(str(tmp_path), (".csv",))
    listings: list[str] = []
    store_list = LocalStore.list

    def counted(store: LocalStore, prefix: str) -> Iterator[StoredFile]:
        listings.append(prefix)
        return store_list(store, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    assert [tables.are_there() for _ in range(3)] == [True] * 3
    assert len(listings) == 1
    # Nothing is believed for longer than it is true.
    for name in ("a.csv", "b.csv"):
        assert tables.are_there()
        (tmp_path / name).unlink()
    assert not tables.are_there()


@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "webdataset", "table", "zip"])
def test_a_container_whose_name_is_no_text_is_named(kind: str, tmp_path: Path):
    suffix = {"webdataset": "tar", "table": "csv"}.get(kind, kind)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / os.fsdecode(b"\xff." + suffix.encode())).write_bytes(b"uri\n1.jpg\n")
    with pytest.raises(UsageError, match=r"holds folder/\\xff\..*, whose path is not UTF-8"):
        list_images(SourceConfig(uri=str(tmp_path), kind=kind))
