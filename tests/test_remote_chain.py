"""The small chain with source, dataset and models on S3 and on HDFS: ETL, verify, train, export, promote, predict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.reader import read_samples
from shardmill.stores import open_store
from tests.support import upload, write_images


def shardmill(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments, "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.drill
@pytest.mark.parametrize("root_fixture", ["gateway_bucket", "hdfs_root"])
def test_the_chain_runs_on_remote_storage(root_fixture: str, request: pytest.FixtureRequest, tmp_path: Path):
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
engine = "spark"
image_size = 16
formats = ["parquet", "tfrecord"]
[train]
epochs = 2
global_batch_size = 16
[train.augment]
random_flip = false
""")
    # The run's record is there too, where no file can be appended to.
    workdir = f"{root}/work"

    summary = shardmill("run", str(config), "--workdir", workdir)
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

    # What Spark said was copied there at its end; the secret is in nothing that the run left.
    record = open_store(f"{workdir}/runs/{summary['run_id']}")
    left = {file.path: record.read(file.path) for file in record.list("")}
    assert {"events.jsonl", "spark.log", "summary.json"} <= left.keys() and left["events.jsonl"]
    secret = os.environ.get("AWS_SECRET_ACCESS_KEY", "not on HDFS")
    assert secret.encode() not in b"".join(left.values())
