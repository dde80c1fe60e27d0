"""Containers that vanish between the list of files and their listing: counted as missing, or one line."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from shardmill.errors import StorageError
from shardmill.registry import Entry
from shardmill.storage import StoredFile
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from shardmill.values import RejectReason
from tests.etl.building import list_images
from tests.lab.datasets import write_images


class VanishingStore(LocalStore):
    """`vanishing:///folder`: files with `gone` in their names are deleted as soon as they were listed."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("vanishing://"))

    def list(self, prefix: str) -> Iterator[StoredFile]:
        found = list(super().list(prefix))
        for file in found:
            if "gone" in file.path:
                self.delete(file.path)
        return iter(found)


@pytest.fixture(autouse=True)
def scheme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORES.entries, "vanishing", Entry("tests.etl.test_vanishing:VanishingStore", ""))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`tar/a.tar` and `zip/a.zip`, each with six images."""
    write_images(tmp_path / "images", num_images=6)
    (tmp_path / "tar").mkdir()
    (tmp_path / "zip").mkdir()
    places = tmp_path / "tar" / "a.tar", tmp_path / "zip" / "a.zip"
    with tarfile.open(places[0], "w") as tar, zipfile.ZipFile(places[1], "w") as zipped:
        for file in sorted((tmp_path / "images").rglob("*.png")):
            tar.add(file, arcname=f"{file.parent.name}/{file.name}")
            zipped.write(file, arcname=f"{file.parent.name}/{file.name}")
    return tmp_path


def source_of(folder: Path, kind: str, *names: str) -> SourceConfig:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"never read")
    return SourceConfig(uri=f"vanishing://{folder}", kind=kind)


@pytest.mark.parametrize("kind, suffix", [("webdataset", "tar"), ("zip", "zip")])
def test_an_archive_that_vanishes_is_missing_and_the_others_are_listed(folder: Path, kind: str, suffix: str):
    listing = list_images(source_of(folder / suffix, kind, f"gone.{suffix}"), max_source_bytes=10_000)
    assert (listing.num_images, [each.reason for each in listing.rejections]) == (6, [RejectReason.MISSING])


@pytest.mark.parametrize(
    "kind, name",
    [
        ("parquet", "gone.parquet"),
        ("tfrecord", "gone.tfrecord"),
        ("idx", "gone-images-idx3-ubyte"),
        ("cifar", "gone_test_batch"),
    ],
)
def test_every_kind_of_container_may_vanish(tmp_path: Path, kind: str, name: str):
    batches = list(SOURCES[kind](source_of(tmp_path / "files", kind, name)).list())
    assert [(each.key, each.reason) for batch in batches for each in batch.rejections] == [(name, "missing")]
    assert not any(batch.images.num_rows for batch in batches)


def test_a_file_that_decides_how_all_are_read_must_not_vanish(tmp_path: Path):
    with pytest.raises(
        StorageError, match=r"gone.tar vanished while .* was listed; expected a source that does not change"
    ):
        list_images(source_of(tmp_path / "files", "webdataset", "gone.tar"))
