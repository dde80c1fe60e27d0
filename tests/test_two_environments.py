"""What the two environments of uv.lock share: a chain on Spark without Horovod, and each way across the digests of a
dataset and a training that the other one began.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from shardmill.failpoints import VARIABLE
from shardmill.options import ENCODINGS
from tests.lab.commands import ENVIRONMENT, ROOT
from tests.lab.datasets import write_images
from tests.services.spark_connect import running_connect
from tests.shardmill.images.make import one_of_each_format, photo

pytestmark = pytest.mark.drill

HERE = Path(sys.executable)
NEWEST = ROOT / ".venv-3.13" / "bin" / "python"
needs_both = pytest.mark.skipif(not NEWEST.exists(), reason="no .venv-3.13; `make setup PYTHON=3.13` makes it")

CHAIN = """
[source]
uri = "images"
[dataset]
uri = "dataset"
[models]
uri = "models"
[etl]
engine = "spark"
image_size = 16
[spark]
master = "local[2]"
[train]
strategy = "{strategy}"
launcher = "spark_barrier"
num_workers = 2
model = "{model}"
epochs = 2
global_batch_size = 24
num_streams = 6
"""
TRAINING = """
[dataset]
uri = "dataset"
[models]
uri = "{models}"
[train]
strategy = "single"
model = "tests.train.torch_models:relu_cnn"
epochs = 3
global_batch_size = 24
num_streams = 6
checkpoint_every_steps = 2
record_samples = true
"""


def run(python: Path, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the environment that this interpreter is of."""
    path = f"{python.parent}:{ENVIRONMENT['PATH']}"
    return subprocess.run(
        [python, "-m", "pipeline.cli", *arguments, "--json"], cwd=cwd, env={**ENVIRONMENT, **environment, "PATH": path},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def shardmill(python: Path, *arguments: str, cwd: Path) -> dict[str, Any]:
    done = run(python, *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("strategy", "model"),
    [("multi_worker_mirrored", "small_cnn"), ("torch_ddp", "tests.train.torch_models:relu_cnn")],
    ids=["multi_worker_mirrored", "torch_ddp"],
)
def test_the_chain_runs_on_spark_without_horovod(strategy: str, model: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=120)
    (tmp_path / "chain.toml").write_text(CHAIN.format(strategy=strategy, model=model))
    summary = shardmill(HERE, "run", "chain.toml", cwd=tmp_path)
    assert (summary["status"], summary["etl"]["engine"]) == ("ok", "spark")
    trained = summary["train"]
    assert (trained["strategy"], trained["launcher"], trained["world_size"]) == (strategy, "spark_barrier", 2)
    assert summary["export"]["parity_max_abs_diff"] <= 1e-5
    assert summary["promotion"]["decision"] == "promoted"


@needs_both
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_both_build_the_same_dataset_and_one_continues_that_of_the_other(encoding: str, tmp_path: Path):
    """Of files of every format, larger and smaller than what is stored of them."""
    rough_HWC = np.random.RandomState(5).randint(0, 256, (97, 131, 3)).astype(np.uint8)
    for label, picture_HWC in {"smooth": photo(61, 83), "rough": rough_HWC, "small": photo()}.items():
        (tmp_path / "images" / label).mkdir(parents=True)
        for name, data in one_of_each_format(picture_HWC).items():
            (tmp_path / "images" / label / name).write_bytes(data)
    build = ("etl", "images", "--set", "etl.image_size=48", "--set", f"etl.encoding={encoding}")
    build = (*build, "--set", "etl.engine=local", "--set", "etl.max_redecoded_fraction=0")
    first, second = (
        shardmill(python, *build, "--set", f"dataset.uri={name}", cwd=tmp_path)["sections"]["dataset"]
        for python, name in ((HERE, "first"), (NEWEST, "second"))
    )
    assert (first["content_digest"], first["layout_digest"]) == (second["content_digest"], second["layout_digest"])
    assert first["counts"]["accepted"] == 45
    assert cv2.imwrite(str(tmp_path / "images" / "small" / "one_more.png"), rough_HWC)
    grown = shardmill(NEWEST, *build, "--set", "dataset.uri=first", cwd=tmp_path)["sections"]["dataset"]
    assert (grown["version"], grown["counts"]["accepted"]) == (2, 46)


@needs_both
@pytest.mark.exhaustive
def test_spark_and_spark_connect_of_both_build_the_same_dataset(tmp_path: Path):
    write_images(tmp_path / "images", num_images=160)
    build = ("etl", "images", "--set", "etl.image_size=16", "--set", "etl.unit_min_images=20")
    digests = set()
    for python in HERE, NEWEST:
        folder = tmp_path / python.parts[-3]
        folder.mkdir()
        with running_connect(python, folder) as address:
            for engine, master in ("local", "local[2]"), ("spark", "local[2]"), ("spark", address):
                chosen = {"etl.engine": engine, "spark.master": master}
                chosen["dataset.uri"] = f"{folder}/{engine}-{'connect' if master == address else 'own'}"
                settings = [part for name, value in chosen.items() for part in ("--set", f"{name}={value}")]
                sections = shardmill(python, *build, *settings, cwd=tmp_path)["sections"]
                assert (sections["etl"]["engine"], sections["etl"]["num_units"]) == (engine, 8)
                digests.add((sections["dataset"]["content_digest"], sections["dataset"]["layout_digest"]))
    assert len(digests) == 1


@needs_both
@pytest.mark.parametrize(("begun", "continued"), [(HERE, NEWEST), (NEWEST, HERE)], ids=["newer", "older"])
def test_a_training_continues_with_the_other_pytorch(begun: Path, continued: Path, tmp_path: Path):
    write_images(tmp_path / "images", num_images=120)
    shardmill(HERE, "etl", "images", "--set", "etl.image_size=16", "--set", "dataset.uri=dataset", cwd=tmp_path)
    for models in ("whole", "killed"):
        (tmp_path / f"{models}.toml").write_text(TRAINING.format(models=models))
    whole = shardmill(begun, "train", "whole.toml", cwd=tmp_path)["sections"]["train"]
    killed = run(begun, "train", "killed.toml", cwd=tmp_path, **{VARIABLE: "checkpoint_done:2"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    resumed = shardmill(continued, "train", "killed.toml", cwd=tmp_path)["sections"]["train"]
    assert resumed["steps"] == whole["steps"]
    assert (resumed["weights_sha256"], resumed["final_loss_hex"]) == (whole["weights_sha256"], whole["final_loss_hex"])
