"""`etl --dry-run` says what the next run would do, and does none of it."""

from __future__ import annotations

import os
import random
import uuid
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlTree
from etl.job import build_dataset
from pipeline.cli_options import Common
from pipeline.commands.dry_run import DryRun, dry_run
from pipeline.config import load_pipeline
from pipeline.output import progress
from shardmill.errors import RejectLimitExceeded, StorageError
from tests.etl.incremental import paint
from tests.lab.datasets import write_images
from tests.services.faulty_store import FaultyStore

_SETTINGS = ("etl.engine=tests.extending_entries:NEW_ENGINE", "etl.image_size=16", "etl.unit_min_images=16")


def plan(folder: Path, *overrides: str, scheme: str = "") -> DryRun:
    before = sorted(folder.rglob("*"))
    found = dry_run(f"{scheme}{folder}/images", common(folder, *overrides))
    assert sorted(folder.rglob("*")) == before
    return found


def common(folder: Path, *overrides: str) -> Common:
    return Common((*_SETTINGS, *overrides), str(folder / "work"), "r", is_run_named=True, json=False, debug=False)


def build(folder: Path, scheme: str = "") -> None:
    given = common(folder)
    tree = load_pipeline(f"{scheme}{folder}/images", given.overrides, given.workdir)
    build_dataset(tree.part(EtlTree), run_id=uuid.uuid4().hex)


def of_dataset(found: DryRun) -> tuple[int | None, int, int, int]:
    return found.latest_version, found.num_unchanged, found.num_removed, found.num_to_process


def test_it_tells_what_would_stay_and_what_would_be_made(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    first = plan(tmp_path)
    assert of_dataset(first) == (None, 0, 0, 60) and first.num_units > 1
    build(tmp_path)
    same = plan(tmp_path)
    assert (*of_dataset(same), same.num_units) == (1, 60, 0, 0, 0)
    assert same.plan_digest == first.plan_digest
    rng = random.Random(1)
    files = sorted((tmp_path / "images").rglob("*.png"))
    files[0].unlink()
    paint(files[1], rng)
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    changed = plan(tmp_path)
    assert (*of_dataset(changed), changed.num_units) == (1, 58, 2, 2, 1)
    assert ("dataset", "version 1: 58 rows are reused, 2 are removed") in changed.rows()
    os.utime(files[2], ns=(1, 1))
    compared = plan(tmp_path, "etl.detect_changes=content")
    assert (*of_dataset(compared), compared.num_to_compare) == (1, 57, 1, 3, 2)
    assert of_dataset(plan(tmp_path)) == (1, 57, 3, 3)
    assert of_dataset(plan(tmp_path, "etl.image_size=8")) == (1, 0, 60, 60)
    assert of_dataset(plan(tmp_path, "etl.write_mode=append")) == (1, 60, 0, 3)
    for file in files[2:40]:
        file.unlink()
    with pytest.raises(StorageError, match="max_vanished_fraction"):
        plan(tmp_path)


def test_it_reads_no_image_and_tells_how_far_the_listing_is(
    tmp_path: Path, faulty: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    write_images(tmp_path / "images", num_images=60)
    # What is no image is told before the images.
    (tmp_path / "images" / "class_0" / "notes.txt").write_text("notes")
    read: list[str] = []

    def noted(store: FaultyStore, path: str) -> bytes:
        read.append(path)
        return store.sound.read(path)

    faulty["read"] = noted
    # Lines come after seconds; here from the second batch of the listing on.
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.0)
    assert plan(tmp_path, scheme="faulty://").num_to_process == 60
    lines = capsys.readouterr().err.splitlines()
    assert "etl, listing: 61 inputs" in lines and not read
    build(tmp_path, scheme="faulty://")
    assert len(read) == 60
    assert plan(tmp_path, scheme="faulty://").num_unchanged == 60 and len(read) == 60
    # A size that is left open is that of the version, or what some of the images decide.
    assert plan(tmp_path, "etl.image_size=0", scheme="faulty://").num_unchanged == 60 and len(read) == 60
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert plan(tmp_path, "etl.image_size=0", scheme="faulty://").stored_as.startswith("32 x 32 x 3 (")
    assert 60 < len(read) <= 60 + 32


def test_it_says_what_would_be_decoded_again_and_keeps_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_images(tmp_path / "images", num_images=20)
    build(tmp_path)
    with pytest.raises(RejectLimitExceeded, match=r"20 of the 20 images .* because of the config \(etl.image_size 16"):
        plan(tmp_path, "etl.image_size=24", "etl.max_redecoded_fraction=0.9")
    assert plan(tmp_path, "etl.image_size=24").num_to_process == 20
    assert "20 of the 20 images of version 1 are decoded again, because of" in capsys.readouterr().err
