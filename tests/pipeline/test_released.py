"""What a release wrote is read by later versions: dataset, training, checkpoint, export and run record of each.

`python -m tests.pipeline.test_released` writes those of this version; it is run once, for the commit of a release.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from shardmill import __version__, open_dataset
from shardmill.dataset.verify import verify_dataset
from tests.lab.commands import in_process
from tests.lab.datasets import write_images

RELEASED = Path(__file__).parent / "released"
# A training is known by the place of its dataset, so that the files are only right where they were written.
PLACE = Path("/tmp/shardmill-released")
MODEL = """
from torch import nn


def build(image_shape, num_classes):
    height, width, channels = image_shape
    return nn.Sequential(nn.Flatten(), nn.Linear(height * width * channels, num_classes))
"""
NUM_IMAGES, NUM_EPOCHS = 60, 2
CONFIG = f"""
[source]
uri = "images"
[dataset]
uri = "dataset"
[models]
uri = "models"
[etl]
image_size = 16
formats = ["parquet", "tfrecord"]
[train]
model = "released_model:build"
num_workers = 1
global_batch_size = 12
epochs = {NUM_EPOCHS}
"""


@pytest.fixture
def place() -> Path:
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir()
    return PLACE


@pytest.mark.parametrize("release", sorted(file.name.removesuffix(".tar.xz") for file in RELEASED.glob("*.tar.xz")))
def test_what_a_release_wrote_is_read_and_its_training_continues(release: str, place: Path):
    with tarfile.open(RELEASED / f"{release}.tar.xz") as archive:
        archive.extractall(place, filter="data")

    # Every byte of every file, in both formats; and the rows that a reader returns.
    dataset = open_dataset(str(place / "dataset"))
    verify_dataset(dataset, deep=True).raise_if_failed()
    for name in ("parquet", "tfrecord"):
        batches = dataset.batches("train", global_batch_size=12, rank=0, world_size=1, seed=0, format=name)
        with batches as epoch:
            ids = np.concatenate([batch.sample_ids[batch.weights > 0] for batch in epoch])
        assert len(ids) == len(set(ids.tolist())) == dataset.manifest.splits["train"].num_rows

    shown = in_process("report", "--workdir", "work", "--run-id", "released", cwd=place)
    assert shown.returncode == 0 and (place / "work/runs/released/report.html").is_file(), shown.stderr
    predicted = in_process("predict", "models", "image.png", "--json", cwd=place)
    assert json.loads(predicted.stdout)[0]["label"] == "class_0", predicted.stderr

    # One epoch more begins with the last checkpoint.
    trained = in_process("train", "config.toml", "--set", f"train.epochs={NUM_EPOCHS + 1}", "--json", cwd=place)
    assert trained.returncode == 0 and f"continuing from {NUM_EPOCHS} finished epochs" in trained.stderr, trained.stderr
    assert json.loads(trained.stdout)["sections"]["train"]["epochs"] == NUM_EPOCHS + 1


def write(place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    write_images(place / "images", num_images=NUM_IMAGES)
    (place / "released_model.py").write_text(MODEL, encoding="utf-8")
    (place / "config.toml").write_text(CONFIG, encoding="utf-8")
    done = in_process("run", "config.toml", "--workdir", "work", "--run-id", "released", cwd=place)
    assert done.returncode == 0, done.stderr
    shutil.move(place / "images/class_0/00000.png", place / "image.png")
    for written_again in ("__pycache__", "images", "work/runs/released/report.html", "work/runs/released/tensorboard"):
        path = place / written_again
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    RELEASED.mkdir(exist_ok=True)
    with tarfile.open(RELEASED / f"{__version__}.tar.xz", "w:xz") as archive:
        for path in sorted(place.iterdir()):
            archive.add(path, path.name)
    return RELEASED / f"{__version__}.tar.xz"


if __name__ == "__main__":
    print(write(PLACE))
