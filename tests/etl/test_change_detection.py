"""A later run reads the right inputs: chosen by their listing, or by their bytes."""

from __future__ import annotations

import os
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.units.write_unit import Decoders
from shardmill.dataset.unit_result import PENDING
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import StorageError
from shardmill.images.sandbox import DecodeSandbox
from shardmill.jobs.config import DatasetConfig
from tests.etl.incremental import CONFIG, build, opened, paint
from tests.lab.datasets import write_images


def _touch(folder: Path, num_files: int, mtime_ns: int = 1) -> list[Path]:
    touched = sorted((folder / "images").rglob("*.png"))[:num_files]
    for file in touched:
        os.utime(file, ns=(mtime_ns, mtime_ns))
    return touched


def test_touched_files_are_read_once_and_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=40)
    first = build(tmp_path)
    _touch(tmp_path, 5)
    # With an image to decode its child would be started, and end.
    no_child = DecodeSandbox(entry="nothing.there:at_all")
    monkeypatch.setattr("etl.units.write_unit.sandboxes_of_process", lambda config: Decoders(no_child, no_child))
    touched = build(tmp_path, detect_changes="content")
    assert (touched.manifest.version, touched.num_images_read) == (1, 5)
    again = build(tmp_path, detect_changes="content")
    assert (again.manifest.version, again.num_images_read) == (1, 0)
    assert again.manifest == first.manifest


@pytest.mark.parametrize("num_removed", [0, 3])
def test_the_next_version_remembers_the_times_of_what_was_touched(num_removed: int, tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    build(tmp_path)
    touched = _touch(tmp_path, 20)
    for file in touched[:num_removed]:
        file.unlink()
    rng = random.Random(1)
    paint(touched[5], rng)
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    changed = build(tmp_path, detect_changes="content")
    assert (changed.manifest.version, changed.num_images_read) == (2, 21 - num_removed)
    assert changed.manifest.content_digest == build(tmp_path, "whole").manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()
    # Only what is new since: the touched ones are known with their new times now.
    paint(tmp_path / "images" / "class_0" / "newer.png", rng)
    assert build(tmp_path, detect_changes="content").num_images_read == 1


def test_a_file_that_is_listed_by_name_alone_is_compared_by_its_bytes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    lines = [f"{file},{file.parent.name}\n" for file in files]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(lines))
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "table.csv"), kind="table"),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=CONFIG.model_copy(update={"detect_changes": "content"}),
    )
    first = build_dataset(tree, run_id="1").manifest
    # Their bytes may be others each time: that they were read says nothing of the next run.
    for run_id in ("same", "same again"):
        same = build_dataset(tree, run_id=run_id)
        assert (same.manifest.version, same.num_images_read) == (1, 30)
    paint(files[3], random.Random(1))
    by_name = tree.model_copy(update={"etl": CONFIG})
    assert build_dataset(by_name, run_id="2").skipped
    outcome = build_dataset(tree, run_id="3")
    assert (outcome.manifest.version, outcome.num_images_read) == (2, 30)
    assert outcome.manifest.content_digest != first.content_digest


def test_the_rows_of_an_archive_that_was_packed_again_stay(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)

    def pack() -> None:
        with tarfile.open(tmp_path / "images.tar", "w") as archive:
            for file in sorted((tmp_path / "images").rglob("*.png")):
                archive.add(file, file.relative_to(tmp_path / "images").as_posix())

    pack()
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "images.tar"), kind="webdataset"),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=CONFIG.model_copy(update={"detect_changes": "content"}),
    )
    build_dataset(tree, run_id="1")
    before = {shard.path for shard in opened(tmp_path).shards}
    paint(tmp_path / "images" / "class_0" / "0.png", random.Random(1))
    pack()
    assert build_dataset(tree, run_id="2").manifest.version == 2
    assert before < {shard.path for shard in opened(tmp_path).shards}
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_rows_of_a_table_that_names_some_splits_are_not_read_again(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    table = tmp_path / "table.csv"

    def name_splits(*names: str) -> None:
        named = dict(zip(files, names, strict=False))
        lines = [f"{file},{file.parent.name},{named.get(file, '')}\n" for file in files]
        table.write_text("uri,label,split\n" + "".join(lines))

    name_splits("test", "train", "validation")
    tree = EtlTree(
        source=SourceConfig(uri=str(table), kind="table"),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=CONFIG,
    )
    build_dataset(tree, run_id="1")
    # The second is decided by its content from now on, the fourth is not any more.
    name_splits("test", "", "validation", "validation")
    outcome = build_dataset(tree, run_id="2")
    assert outcome.num_images_read <= 2
    whole = tree.model_copy(update={"dataset": DatasetConfig(uri=str(tmp_path / "whole"))})
    assert outcome.manifest.content_digest == build_dataset(whole, run_id="3").manifest.content_digest


def test_a_source_that_lost_most_of_its_images_replaces_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path)
    files = sorted((tmp_path / "images").rglob("*.png"))
    rng = random.Random(1)
    for file in files[:15]:
        file.unlink()
    for file in files[15:]:
        # Changed, and there: none of them has vanished.
        paint(file, rng)
    assert build(tmp_path).manifest.counts.accepted == 15
    for file in files[15:23]:
        file.unlink()
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    for change in ({}, {"image_size": 8}):
        with pytest.raises(StorageError, match=r"8 of the 15 images of version 2 .*max_vanished_fraction allows 0.5"):
            build(tmp_path, **change)
        assert opened(tmp_path).manifest.version == 2
    assert build(tmp_path, max_vanished_fraction=0.6).manifest.counts.accepted == 8


def test_a_change_behind_a_copy_that_is_dropped_again_is_noticed(tmp_path: Path):
    """The commit itself finds the parent again, because the copy was read and refused as it was before."""
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    shutil.copy(files[0], tmp_path / "images" / "z_copy.png")
    rows = [(file, file.parent.name) for file in files] + [(tmp_path / "images" / "z_copy.png", files[0].parent.name)]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(f"{file},{label}\n" for file, label in rows))
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "table.csv"), kind="table"),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=CONFIG.model_copy(update={"detect_changes": "content", "duplicates": "drop"}),
    )
    build_dataset(tree, run_id="1")
    assert build_dataset(tree, run_id="2").manifest.version == 1
    assert list((tmp_path / "dataset" / PENDING).glob("*")) == []
    paint(files[5], random.Random(1))
    changed = build_dataset(tree, run_id="3").manifest
    assert changed.version == 2
    whole = tree.model_copy(update={"dataset": DatasetConfig(uri=str(tmp_path / "whole"))})
    assert changed.content_digest == build_dataset(whole, run_id="4").manifest.content_digest
