"""A build that is killed anywhere: readers notice nothing, and the same command finishes the work."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from etl.config import EtlConfig
from etl.plan import plan_build
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.failpoints import FAILPOINTS, VARIABLE
from shardmill.loader.samples import read_samples
from tests.etl.building import tree_for
from tests.lab.commands import MODULES
from tests.lab.datasets import build_here, write_images
from tests.lab.scale import in_drills, usually
from tests.polling import polled
from tests.quick_start.forked import Program, run_forked
from tests.services.marked import MARK, marked

ROOT = Path(__file__).parents[2]
_SETTINGS = EtlConfig(engine="local", num_workers=2, image_size=16, encoding="png", unit_min_images=8)
_NUM_OLD = 24
_NUM_KILLS = usually(1, 30)
_DRIVER_POINTS = ("list", "manifest_put", "post_commit")
_WORKER_POINTS = ("decode", "shard_open", "shard_mid", "shard_close", "task_report")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 images and version 1 of them in `dataset`, then 12 images more; `full` is built of all."""
    return write_before(tmp_path_factory.mktemp("before"), num_images=36)


def write_before(folder: Path, num_images: int) -> Path:
    write_images(folder / "images", num_images=_NUM_OLD)
    build_here(str(folder / "images"), str(folder / "dataset"), _SETTINGS)
    write_images(folder / "more", num_images=num_images, seed=1)
    for path in (folder / "more").rglob("*.png"):
        if int(path.stem) >= _NUM_OLD:
            shutil.copy(path, folder / "images" / path.relative_to(folder / "more"))
    build_here(str(folder / "images"), str(folder / "full"), _SETTINGS)
    return folder


@pytest.fixture
def folder(before: Path, tmp_path: Path) -> Path:
    shutil.copytree(before / "dataset", tmp_path / "dataset")
    return tmp_path


def run_etl(before: Path, folder: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    """`spark-submit etl/job.py` without Spark, to its end; forked from a process that has imported the job."""
    environment = {**os.environ, VARIABLE: failpoint}
    _, *arguments = map(str, etl_command(before, folder))
    return run_forked(MODULES, Program("etl.job:main", arguments, str(folder), environment), 200)


def etl_command(before: Path, folder: Path) -> list[str | Path]:
    config = folder / "config.toml"
    config.write_text(
        f'[source]\nuri = "{before}/images"\n[dataset]\nuri = "{folder}/dataset"\n[etl]\nengine = "local"\n'
        'num_workers = 2\nimage_size = 16\nencoding = "png"\nunit_min_images = 8\n'
    )
    return [sys.executable, ROOT / "etl" / "job.py", "--config", config, "--workdir", folder / "work"]


def look_at(root: Path, num_images: int = 36) -> None:
    """The dataset as a reader opens it: one whole version, and the old one behind it."""
    dataset = open_dataset(str(root))
    assert dataset.manifest.counts.accepted == {1: _NUM_OLD, 2: num_images}[dataset.pin.version]
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
    assert json.loads(done.stdout)["sections"]["etl"]["num_task_retries"] == 1
    check_finished(before, folder)


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "point", ["manifest_put", "decode:5", *in_drills("list", "post_commit", "shard_open:2", *_WORKER_POINTS[2:])]
)
def test_a_build_that_is_killed_is_finished_by_the_same_command(before: Path, folder: Path, point: str):
    name = point.partition(":")[0]
    assert name in FAILPOINTS
    with polled(partial(look_at, folder / "dataset")):
        # A worker that dies twice ends the build with exit 4; the others kill the driver itself.
        killed = run_etl(before, folder, point)
        assert killed.returncode == (4 if name in _WORKER_POINTS else -9), killed.stderr
        named = (
            "ERROR 4: the process of work unit \\d+ ended twice .*the last image that it started was "
            "class_\\d/\\d+\\.png"
        )
        assert name not in _WORKER_POINTS or re.search(named, killed.stderr), killed.stderr
        assert open_dataset(str(folder / "dataset")).pin.version == (2 if name == "post_commit" else 1)
        again = run_etl(before, folder)
        assert again.returncode == 0, again.stderr
    check_finished(before, folder)


@pytest.mark.drill
@pytest.mark.timeout(600 + 60 * _NUM_KILLS)
def test_a_build_that_is_killed_at_any_time_loses_nothing(tmp_path: Path):
    seed, num_images = random.SystemRandom().randrange(2**32), 400
    print(f"seed {seed}")
    rng, before = random.Random(seed), write_before(tmp_path / "before", num_images)
    num_units = len(plan_build(tree_for(before, "other", etl=_SETTINGS), run_id="r").units)
    for number in range(_NUM_KILLS):
        folder = tmp_path / f"{number}"
        shutil.copytree(before / "dataset", folder / "dataset")
        with polled(partial(look_at, folder / "dataset", num_images)):
            print(kill_at_any_time(before, folder, rng, num_units))
            again = run_etl(before, folder)
            assert again.returncode == 0, again.stderr
        check_finished(before, folder)
        assert not list(folder.glob("dataset/pending/*.json"))
        shutil.rmtree(folder)


def kill_at_any_time(before: Path, folder: Path, rng: random.Random, num_units: int) -> str:
    """A build that is killed a while after a number of its units have finished; where that was."""
    wanted, seconds, mark = rng.randint(0, num_units), rng.uniform(0, 0.5), f"{folder} killed"
    with open(folder / "output", "w") as output:
        command, environment = etl_command(before, folder), {**os.environ, MARK: mark}
        build = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    while not list(folder.glob("dataset/leases/*")) or finished_units(folder) < wanted:
        if build.poll() is not None:
            break  # it was too quick for us to see so many
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        build.wait(seconds)
    build.kill()
    status, deadline = build.wait(), time.monotonic() + 30
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert status in (0, -signal.SIGKILL), (folder / "output").read_text()
    version = open_dataset(str(folder / "dataset")).pin.version
    return f"{seconds:.2f} s after {wanted} units: status {status}, version {version}, {finished_units(folder)} records"


def finished_units(folder: Path) -> int:
    return len(list(folder.glob("dataset/pending/*.json")))
