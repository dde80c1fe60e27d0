"""The small chain on remote storage: ETL, verify, a training that is killed and resumes, export, promote, predict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.failpoints import VARIABLE
from shardmill.jobs.line_log import read_lines
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.lab.datasets import upload, write_images
from tests.lab.scale import IS_FULL

# Spark over HDFS is for the tests on YARN.
CASES = [
    ("gateway_bucket", "spark", "parquet"), ("hdfs_root", "local", "tfrecord"), ("gcs_bucket", "local", "parquet"),
    ("azure_container", "local", "tfrecord"),
]  # fmt: skip
if IS_FULL:
    CASES = [(root, engine, name) for root, _, _ in CASES for engine in ("spark", "local")
             for name in ("parquet", "tfrecord")]  # fmt: skip


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments, "--json"], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def shardmill(*arguments: str) -> dict[str, Any]:
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.drill
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("root_fixture", "engine", "format_name"), CASES)
def test_the_chain_runs_on_remote_storage(root_fixture: str, engine: str, format_name: str, request, tmp_path: Path):
    root = request.getfixturevalue(root_fixture)
    # Upload the images; a name with a space, a percent sign and a hash must survive the way.
    write_images(tmp_path / "images", num_images=60)
    first = next((tmp_path / "images" / "class_0").iterdir())
    first.rename(first.with_name("a b%20c#1.png"))
    upload(tmp_path / "images", f"{root}/images")
    config = tmp_path / "remote.toml"
    config.write_text(f"""
[source]
uri = "{root}/images"
[dataset]
uri = "{root}/dataset"
[models]
uri = "{root}/models"
[etl]
engine = "{engine}"
image_size = 16
formats = ["parquet", "tfrecord"]
[train]
epochs = 2
global_batch_size = 16
format = "{format_name}"
checkpoint_every_steps = 2
record_samples = true
[train.augment]
random_flip = false
""")
    # The run's record is there too, where no file can be appended to.
    workdir = f"{root}/work"

    if engine == "spark":
        # In a run of its own, which lives to copy what Spark said.
        shardmill("etl", str(config), "--workdir", workdir, "--run-id", "spark")
    # The driver is the only rank: it dies when the second marker is there, and the run goes on from there.
    chain = ("run", str(config), "--workdir", workdir, "--run-id", "run")
    killed = run_command(*chain, **{VARIABLE: "checkpoint_done:2"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    summary = shardmill(*chain)
    runs = open_store(f"{workdir}/runs")
    events = [json.loads(line) for line in read_lines(runs, "run/events.jsonl")]
    [resumed] = [event for event in events if event["event"] == "train.resumed"]
    assert 2 < resumed["global_step"] < summary["train"]["steps"]
    # Each step once, in order, though two processes wrote them.
    steps = [json.loads(line) for line in read_lines(runs, "run/steps.jsonl")]
    num_steps = summary["train"]["steps"] // 2
    assert [(line["epoch"], line["step"]) for line in steps] == [
        (epoch, n) for epoch in (0, 1) for n in range(num_steps)
    ]
    assert summary["stages"]["etl"]["status"] == "skipped"
    assert summary["dataset"]["counts"]["listed"] == summary["dataset"]["counts"]["accepted"] == 60
    assert summary["export"]["path"].startswith(f"{root}/models/")
    assert summary["export"]["parity_max_abs_diff"] <= 1e-5
    assert summary["promotion"]["decision"] == "promoted"
    dataset = open_dataset(f"{root}/dataset")
    verify_dataset(dataset, deep=True).raise_if_failed()
    assert any(sample.source.endswith("a b%20c#1.png") for s in dataset.manifest.splits
               for sample in read_samples(dataset, s, 60))  # fmt: skip

    # Nothing changed, so nothing is done again.
    again = shardmill("run", str(config), "--workdir", workdir)
    assert again["dataset"]["version"] == 1
    assert again["train"]["weights_sha256"] == summary["train"]["weights_sha256"]
    assert again["promotion"]["decision"] == "already_current"

    # A model there serves a file from here.
    image = next((tmp_path / "images" / "class_1").iterdir())
    predicted = shardmill("predict", f"{root}/models", str(image))
    assert image.name in json.dumps(predicted) and "class_" in json.dumps(predicted)

    # What Spark said was copied there at its end; the secret is in nothing that the runs left.
    left = {file.path: runs.read(file.path) for file in runs.list("")}
    assert {"run/events.jsonl", "run/summary.json"} <= left.keys() and left["run/events.jsonl"]
    assert ("spark/spark.log" in left) == (engine == "spark")
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "not on S3")
    assert secret.encode() not in b"".join(left.values())
