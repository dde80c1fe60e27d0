"""Every recipe is a config that works: on a stand-in of its data it passes all checks, builds, and trains an epoch."""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import load_pipeline
from pipeline.preflight import refuse_what_cannot_work
from pipeline.tree import PipelineTree
from shardmill.dataset.open import open_dataset
from shardmill.jobs.observer import SilentObserver
from tests.cifar_files import write_cifar10
from tests.etl.source_files import idx_bytes
from tests.lab.datasets import build_here, write_images
from tests.train.training import train_here
from train.planning.make import plan_training
from train.planning.preflight import check_trainable
from train.planning.trial_build import try_build

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "examples" / "recipes"
PAGE = ROOT / "docs" / "recipes.md"


class Observer(SilentObserver):
    """Hears nothing of steps."""

    def step(self, step: object) -> None:
        return


def digits(folder: Path) -> Path:
    write_images(folder / "images", num_images=200, num_classes=10, image_size=32)
    return folder / "images"


def fashion_mnist(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 160), ("t10k", 40)):
        pixels = rng.integers(0, 255, (count, 28, 28), np.uint8)
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx_bytes(pixels)))
        labels = np.arange(count, dtype=np.uint8) % 10
        (folder / f"{split}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(labels)))
    return folder


def cifar10(folder: Path) -> Path:
    write_cifar10(folder / "cifar-10-batches-py", 30)
    return folder / "cifar-10-batches-py"


def imagenet_resnet50(folder: Path) -> Path:
    """The table that examples/make_table.py writes."""
    write_images(folder, num_images=30, image_size=300)
    files = sorted(folder.rglob("*.png"))
    with open(folder / "imagenet.csv", "w", newline="") as out:
        rows = ((file, file.parent.name, "train" if place % 3 else "validation") for place, file in enumerate(files))
        csv.writer(out).writerows([("uri", "label", "split"), *rows])
    return folder / "imagenet.csv"


STAND_INS: dict[str, Callable[[Path], Path]] = {
    each.__name__: each for each in (digits, fashion_mnist, cifar10, imagenet_resnet50)
}
NOT_RUN = {"imagenet_resnet50"}
"""Too large to train here; its model is built."""


def checked(name: str, folder: Path) -> PipelineTree:
    """The recipe's config on its stand-in, after all that a run refuses before it works."""
    (folder / "source").mkdir()
    below = {
        "source.uri": STAND_INS[name](folder / "source"),
        "dataset.uri": folder / "dataset",
        "models.uri": folder / "models",
    }
    overrides = tuple(f"{key}={value}" for key, value in below.items())
    tree = load_pipeline(str(RECIPES / f"{name}.toml"), overrides, str(folder / "work"))
    refuse_what_cannot_work(tree, str(folder / "work"))
    return tree


NAMES = sorted(path.stem for path in RECIPES.glob("*.toml"))


@pytest.mark.starts("program")
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_passes_all_checks_of_a_run(name: str, tmp_path: Path):
    checked(name, tmp_path)


@pytest.mark.drill
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains_on_a_stand_in(name: str, tmp_path: Path):
    tree = checked(name, tmp_path)
    dataset = open_dataset(build_here(tree.source, tree.dataset.uri, tree.etl))
    # CIFAR's folder holds a page, too.
    assert set(dataset.manifest.counts.by_reason) <= {"not_an_image_name"} and "train" in dataset.manifest.splits
    plan = plan_training(tree.train, tree.spark, dataset)
    check_trainable(plan.config, dataset, tree.gate)
    if name in NOT_RUN:
        assert try_build(plan.config, dataset.manifest.row_schema, Observer()) is not None
        return
    config: dict[str, Any] = tree.train.model_dump() | {"epochs": 1, "global_batch_size": 64, "warmup_steps": 0}
    result = train_here(tree.dataset.uri, tree.models.uri, **config)
    assert len(result.history) == 1 and np.isfinite(result.history[0].train_loss)


def test_the_imagenet_recipe_has_the_published_schedule():
    """Goyal et al., arXiv:1706.02677, section 5.1: of any batch, the epochs and the rates of the paper."""
    from train.schedules import learning_rate_at

    train = load_pipeline(str(RECIPES / "imagenet_resnet50.toml"), (), "work").train
    for batch_size, rate in ((256, 0.1), (8192, 3.2)):
        steps_per_epoch = -(-1_281_167 // batch_size)
        config = train.model_copy(update={"global_batch_size": batch_size, "warmup_steps": 5 * steps_per_epoch})
        rates = [learning_rate_at(config, epoch * steps_per_epoch, steps_per_epoch) for epoch in range(90)]
        assert rates[5:30] == pytest.approx([rate] * 25) and rates[4] == pytest.approx(0.8 * rate, rel=0.01)
        expected = [rate / 10] * 30 + [rate / 100] * 20 + [rate / 1000] * 10
        assert rates[30:] == pytest.approx(expected)
    assert train.warmup_steps == 5 * -(-1_281_167 // train.global_batch_size)


def test_the_page_and_the_recipes_name_each_other():
    page = PAGE.read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in re.findall(r"^## (.*)$", page, re.M)
    }
    for path in RECIPES.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        assert f"shardmill run examples/recipes/{path.name}" in text and f"examples/recipes/{path.name}" in page
        assert set(re.findall(r"docs/recipes\.md#([\w-]+)", text)) <= anchors
    assert "examples/finetune.toml" in page
