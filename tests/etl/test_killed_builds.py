"""A build that is killed anywhere: readers notice nothing, and the same command finishes the work."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from etl.config import EtlConfig
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.failpoints import FAILPOINTS, VARIABLE
from shardmill.reader import read_samples
from tests.polling import polled
from tests.support import build_here, write_images

ROOT = Path(__file__).parents[2]
_SETTINGS = EtlConfig(engine="local", num_workers=2, image_size=16, encoding="png", unit_min_images=8)
_DRIVER_POINTS = ("list", "manifest_put", "post_commit")
_WORKER_POINTS = ("decode", "shard_open", "shard_mid", "shard_close", "task_report")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 images and version 1 of them in `dataset`, then 12 images more; `full` is built of all."""
    folder = tmp_path_factory.mktemp("before")
    write_images(folder / "images", num_images=24)
    build_here(str(folder / "images"), str(folder / "dataset"), _SETTINGS)
    write_images(folder / "more", num_images=36, seed=1)
    for path in (folder / "more").rglob("*.png"):
        if int(path.stem) >= 24:
            shutil.copy(path, folder / "images" / path.relative_to(folder / "more"))
    build_here(str(folder / "images"), str(folder / "full"), _SETTINGS)
    return folder


@pytest.fixture
def folder(before: Path, tmp_path: Path) -> Path:
    shutil.copytree(before / "dataset", tmp_path / "dataset")
    return tmp_path


def run_etl(before: Path, folder: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    """`spark-submit etl/job.py` without Spark, to its end."""
    config = folder / "config.toml"
    config.write_text(
        f'[source]\nuri = "{before}/images"\n[dataset]\nuri = "{folder}/dataset"\n[etl]\nengine = "local"\n'
        'num_workers = 2\nimage_size = 16\nencoding = "png"\nunit_min_images = 8\n'
    )
    command = [sys.executable, ROOT / "etl" / "job.py", "--config", config, "--workdir", folder / "work"]
    environment = {**os.environ, VARIABLE: failpoint}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def look_at(root: Path) -> None:
    """The dataset as a reader opens it: one whole version, and the old one behind it."""
    dataset = open_dataset(str(root))
    assert dataset.manifest.counts.accepted == {1: 24, 2: 36}[dataset.pin.version]
    old = open_dataset(f"{root}@1")
    assert len(read_samples(old, "train", 1000)) == old.manifest.splits["train"].num_rows


def check_finished(before: Path, folder: Path) -> None:
    """Version 2 is what a full build makes of the same images, nothing lost or doubled."""
    done, full = open_dataset(str(folder / "dataset")), open_dataset(str(before / "full"))
    assert (done.pin.version, done.manifest.content_digest) == (2, full.manifest.content_digest)
    verify_dataset(done, deep=True).raise_if_failed()


@pytest.mark.drill
@pytest.mark.parametrize("point", _WORKER_POINTS)
def test_a_worker_that_is_killed_once_costs_the_build_nothing_but_time(before: Path, folder: Path, point: str):
    with polled(partial(look_at, folder / "dataset")):
        done = run_etl(before, folder, f"{point}@{folder}/once")
        assert done.returncode == 0, done.stderr
    assert (folder / "once").exists()
    check_finished(before, folder)


@pytest.mark.parametrize("point", [*_DRIVER_POINTS, "decode:5", "shard_open:2", *_WORKER_POINTS[2:]])
def test_a_build_that_is_killed_is_finished_by_the_same_command(before: Path, folder: Path, point: str):
    name = point.partition(":")[0]
    assert name in FAILPOINTS
    with polled(partial(look_at, folder / "dataset")):
        # A worker that dies twice ends the build with exit 4; the others kill the driver itself.
        killed = run_etl(before, folder, point)
        assert killed.returncode == (4 if name in _WORKER_POINTS else -9), killed.stderr
        named = (
            r"ERROR 4: the process of work unit \d+ ended twice .*the last image that it began was class_\d/\d+\.png"
        )
        assert name not in _WORKER_POINTS or re.search(named, killed.stderr), killed.stderr
        assert open_dataset(str(folder / "dataset")).pin.version == (2 if name == "post_commit" else 1)
        again = run_etl(before, folder)
        assert again.returncode == 0, again.stderr
    check_finished(before, folder)
