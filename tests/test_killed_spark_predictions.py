"""Predictions of a real export on a Spark cluster that loses an executor, or its driver: the answers of one machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.dataset import has_version, open_dataset
from shardmill.dataset.verify import verify_dataset
from tests.lab.commands import shardmill
from tests.lab.datasets import write_images
from tests.services.lost_executor import STOPS_IN_SECOND_UNIT, replace_an_executor, wait_for_both_stopped
from tests.services.spark_standalone import SparkCluster
from tests.services.spark_submit import Submitted, Submitter, make_bundle, summary_of, to_standalone

pytestmark = [pytest.mark.drill, pytest.mark.timeout(1200)]

CONFIG = """
[source]
uri = "{folder}/images"
[dataset]
uri = "{folder}/dataset"
[models]
uri = "{folder}/models"
[etl]
image_size = 16
unit_min_images = 8
chunk_bytes = 8000
max_reject_fraction = 0.1
[train]
epochs = 1
model = "net:net"
global_batch_size = 24
num_streams = 6
num_workers = 1
"""
TORCH = """
from torch import nn


def net(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, 16), nn.GELU(), nn.Linear(16, num_classes))
"""
ANSWERS = ("--top", "2", "--layer", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, one of them broken; a promoted PyTorch model; our bundle; and `local`, what this machine predicts."""
    folder = tmp_path_factory.mktemp("predictions")
    write_images(folder / "images", num_images=240)
    (folder / "net.py").write_text(TORCH)
    (folder / "photos.toml").write_text(CONFIG.format(folder=folder))
    make_bundle(folder)
    done(folder, "run", "photos.toml", "--set", "etl.engine=local")
    (folder / "images" / "class_0" / "broken.jpg").write_bytes(b"no image")
    done(folder, "predict", "models", "photos.toml", "--out", "local", "--engine", "local", *ANSWERS)
    return folder


def done(folder: Path, *arguments: str) -> dict[str, Any]:
    ended = shardmill(*arguments, "--json", cwd=folder, timeout=240)
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


@pytest.fixture
def submitter(folder: Path, spark_cluster: SparkCluster) -> Submitter:
    # The model's own file is not among them: a program of PyTorch is whole without it.
    return to_standalone(spark_cluster, folder, folder / "shardmill.zip")


def job_of(out: str, folder: Path) -> tuple[str, ...]:
    """What spark-submit is given; `out` also names the run."""
    named = ("--config", "photos.toml", "--out", f"{folder}/{out}", "--workdir", "work", "--run-id", out)
    return ("etl/predict_job.py", f"{folder}/models", *named, *ANSWERS)


def begin(submitter: Submitter, cluster: SparkCluster, out: str) -> Submitted:
    """Wait until some units have ended and both executors are stopped in the middle of others."""
    submitted = submitter.start(*job_of(out, submitter.folder), **STOPS_IN_SECOND_UNIT)
    wait_for_both_stopped(cluster, submitted)
    assert len(list(submitter.folder.glob(f"{out}/pending/*.json"))) > 1
    return submitted


def check(folder: Path, out: str) -> dict[str, Any]:
    """Returns what the run says that it did."""
    there, here = (open_dataset(f"{folder}/{name}") for name in (out, "local"))
    verify_dataset(there, deep=True).raise_if_failed()
    assert (there.manifest.counts.accepted, there.manifest.counts.rejected) == (240, 1)
    assert there.manifest.content_digest == here.manifest.content_digest
    assert there.manifest.ledger_digest == here.manifest.ledger_digest
    assert not list(folder.glob(f"{out}/pending/*"))
    return summary_of(folder / "work", out)["predictions"]


def test_a_killed_executor_changes_no_answer(folder: Path, submitter: Submitter, spark_cluster: SparkCluster):
    job = begin(submitter, spark_cluster, "executor")
    replace_an_executor(spark_cluster, job)
    assert job.wait() == 0, job.output
    assert check(folder, "executor")["num_task_retries"] >= 1


@pytest.mark.exhaustive
def test_a_killed_driver_is_continued_by_the_same_command(
    folder: Path, submitter: Submitter, spark_cluster: SparkCluster
):
    job = begin(submitter, spark_cluster, "driver")
    os.killpg(job.process.pid, signal.SIGKILL)
    job.wait()
    assert not has_version(f"{folder}/driver")
    again = submitter.run(*job_of("driver", folder))
    assert again.process.returncode == 0, again.output
    assert check(folder, "driver")["num_units_kept"] >= 2
