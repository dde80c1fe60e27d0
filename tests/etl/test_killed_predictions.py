"""Predictions whose driver or workers are killed: the same command finishes them, with the same digest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.failpoints import VARIABLE
from tests.etl.brightness import predict
from tests.lab.scale import in_drills
from tests.quick_start.forked import Program, run_forked

_MODULES = ("etl.job", "etl.commit", "etl.engines.local", "tests.programs.predict_brightness")


def run(images: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: failpoint}
    arguments = [sys.executable, str(images / "images"), str(images / "out")]
    return run_forked(
        _MODULES, Program("tests.programs.predict_brightness:main", arguments, str(images), environment), 200
    )


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "point", ["decode:40", "manifest_put", *in_drills("list", "shard_close:3", "task_report:3", "post_commit")]
)
def test_the_same_command_finishes_what_was_killed(point: str, images: Path):
    whole = predict(images / "images", images / "whole")
    killed = run(images, point)
    # A worker that dies twice ends the build with exit 4; the others kill the driver itself.
    assert killed.returncode in (4, -9), killed.stderr
    is_worker = point.partition(":")[0] in ("decode", "shard_close", "task_report")
    assert killed.returncode == (4 if is_worker else -9)
    again = run(images)
    assert again.returncode == 0, again.stderr
    done = open_dataset(str(images / "out"))
    assert (done.pin.version, done.manifest.content_digest) == (1, whole.manifest.content_digest)
    verify_dataset(done, deep=True).raise_if_failed()
    if point == "manifest_put":
        # All units were finished: nothing was predicted twice.
        assert again.stdout == f"{whole.num_units} kept, 0 retries\n"


@pytest.mark.starts("program")
def test_a_worker_that_is_killed_once_costs_nothing_but_time(images: Path):
    whole = predict(images / "images", images / "whole")
    done = run(images, f"decode:40@{images}/once")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 kept, 1 retries\n"
    assert open_dataset(str(images / "out")).manifest.content_digest == whole.manifest.content_digest
