"""A version that has drifted beyond `etl.max_drift` is not committed; the error says what has moved."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import cv2
import pytest

from etl.outcome import stage_record
from shardmill.data_faults.drift import Drift
from shardmill.dataset.versions import latest_version
from shardmill.errors import DriftLimitExceeded, UsageError
from shardmill.stores import open_store
from tests.etl.incremental import build, tree_for
from tests.lab.datasets import write_images


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of each of three classes 30 images, in a first version."""
    write_images(tmp_path / "images", num_images=90)
    build(tmp_path, max_drift=0.0)
    return tmp_path


def darken(folder: Path, factor: float = 0.2) -> None:
    for file in folder.glob("*.png"):
        assert cv2.imwrite(str(file), cv2.convertScaleAbs(cv2.imread(str(file)), alpha=factor))


def test_a_darkened_folder_is_refused_until_it_is_accepted(folder: Path):
    darken(folder / "images" / "class_1")
    with pytest.raises(DriftLimitExceeded) as caught:
        build(folder, max_drift=0.1)
    assert caught.value.exit_code == 7 and not caught.value.is_worth_retrying
    line = str(caught.value)
    assert re.search(r"drifted by 0\.\d+ from @1: pixels 0\.\d+ \(green mean [\d.]+ -> [\d.]+", line)
    assert "class shares" not in line and "etl.max_drift allows 0.1; nothing was published" in line
    assert latest_version(open_store(folder / "dataset")) == 1
    assert Drift.model_validate(caught.value.detail["drift"]).above(0.1)

    # Accepted once: no image is read again. The version is what the next one is compared with.
    accepted = build(folder, max_drift=1.0)
    assert (accepted.manifest.version, accepted.num_images_read) == (2, 0)
    section = stage_record(accepted, tree_for(folder)).sections["drift"]
    assert Drift.model_validate(section).above(0.1) and section["against_version"] == 1
    write_images(folder / "more", num_images=3, seed=1)
    for number in range(3):
        shutil.move(next((folder / "more" / f"class_{number}").iterdir()), folder / f"images/class_{number}/new.png")
    assert build(folder, max_drift=0.1).manifest.version == 3


def test_a_class_that_has_vanished_is_named_with_its_share(folder: Path):
    shutil.rmtree(folder / "images" / "class_2")
    with pytest.raises(DriftLimitExceeded, match=r"class shares 0\.333 \(class_2 33\.3% -> 0\.0%"):
        build(folder, max_drift=0.3)
    assert build(folder, max_drift=0.55).manifest.counts.accepted == 60


def test_what_has_not_changed_has_no_drift_and_passes_any_limit(folder: Path):
    outcome = build(folder, max_drift=0.0)
    assert outcome.skipped and stage_record(outcome, tree_for(folder)).sections["drift"] is None
    # A copy of every image at twice the size: neither the classes nor the pixels have changed, the sizes have.
    for file in [*(folder / "images").rglob("*.png")]:
        assert cv2.imwrite(str(file), cv2.imread(str(file)).repeat(2, axis=0).repeat(2, axis=1))
    with pytest.raises(DriftLimitExceeded, match=r"source sizes 1\.000 \(16-31 100\.0% -> 0\.0%, 32-63") as caught:
        build(folder, max_drift=0.1)
    assert "class shares" not in str(caught.value)


def test_a_slow_slide_is_seen_against_a_named_version(folder: Path):
    for number in range(2, 4):
        for file in sorted((folder / "images" / "class_0").iterdir())[:8]:
            file.unlink()
        slid = build(folder, max_drift=0.1, drift_baseline=0)
        assert slid.manifest.version == number
    sorted((folder / "images" / "class_0").iterdir())[0].unlink()
    with pytest.raises(DriftLimitExceeded, match=r"from @1: class shares .* set etl.drift_baseline to the new version"):
        build(folder, max_drift=0.1, drift_baseline=1)
    with pytest.raises(UsageError, match=r"etl.drift_baseline = 9: .* has no version 9; expected one of 1 to 3"):
        build(folder, max_drift=0.1, drift_baseline=9)
    assert build(folder, max_drift=0.1).manifest.version == 4
