"""check-source says exactly what a build then rejects, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.lab.commands import BUILD_HERE, in_process, last_line
from tests.lab.datasets import write_images


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """60 images, two files that are none, and a name that is none."""
    folder = tmp_path / "photos"
    write_images(folder, num_images=60)
    (folder / "class_0" / "page.jpg").write_bytes(b"<html>not found</html>")
    (folder / "class_1" / "empty.png").write_bytes(b"")
    (folder / "class_1" / "notes.txt").write_text("notes")
    return folder


@pytest.mark.starts("program")
def test_it_finds_what_the_build_rejects_and_writes_nothing(photos: Path, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    done = in_process("check-source", photos, "--json", "--set", "etl.image_size=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert (found["num_listed"], found["num_accepted"], found["num_rejected"]) == (63, 60, 3)
    assert found["broken_limit"] is None
    assert found["by_class"] == {"class_0": 20, "class_1": 20, "class_2": 20}
    assert sum(found["by_split"].values()) == sum(found["source_sizes"]["longer_side"].values()) == 60

    built = in_process("etl", photos, "--set", "etl.image_size=16", *BUILD_HERE, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    rejects = in_process("inspect", "shardmill-work/dataset", "--rejects", "--json", cwd=tmp_path)
    assert json.loads(rejects.stdout) == found["rejections"]


@pytest.mark.starts("program")
def test_it_counts_the_notes_of_images_and_warns_as_the_build_does(photos: Path, tmp_path: Path):
    dark = np.random.default_rng(0).integers(0, 1 << 12, (32, 32), np.uint16)
    for number in range(3):
        Image.fromarray(dark + number).save(photos / "class_0" / f"dark_{number}.png")
    checked = in_process("check-source", photos, "--json", "--set", "etl.image_size=16", cwd=tmp_path)
    found = json.loads(checked.stdout)
    assert found["by_note"]["low_range_16_bit"] == 3
    [*of_listing, warning] = found["warnings"]
    assert "3 of 3 accepted 16-bit images use at most 14 of their bits" in warning
    built = in_process("etl", photos, "--set", "etl.image_size=16", *BUILD_HERE, cwd=tmp_path)
    assert of_listing and all(each in built.stderr for each in found["warnings"])
    people = in_process("check-source", photos, "--set", "etl.image_size=16", cwd=tmp_path)
    assert "low_range_16_bit 3" in people.stdout and warning in people.stdout
    assert "3: class_0 23, class_1 20, class_2 20" in people.stdout and "longer side in pixels" in people.stdout


@pytest.mark.starts("program")
def test_it_ends_like_the_build_if_too_much_is_rejected(photos: Path, tmp_path: Path):
    settings = ["--set", "etl.image_size=16", "--set", "etl.max_reject_fraction=0.01"]
    checked = in_process("check-source", photos, *settings, cwd=tmp_path)
    built = in_process("etl", photos, *settings, *BUILD_HERE, cwd=tmp_path)
    assert checked.returncode == built.returncode == 7
    assert "2 of 63 inputs were rejected; etl.max_reject_fraction allows 0.01" in last_line(checked)
    assert "class_1/empty.png\tempty_file" in checked.stdout
