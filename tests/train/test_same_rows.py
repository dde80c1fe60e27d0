"""A training belongs to its rows: a version that names the same files, in the same order, is not trained on again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.stores import open_store
from tests.shardmill.collecting import build, gc_now, with_images
from tests.train.training import Recorder
from train.config import TrainConfig
from train.training import finished_training, train_model
from train.tree import TrainTree


def test_an_expiry_or_a_rollback_is_no_reason_to_train_again(tmp_path: Path):
    def tree(dataset_uri: str) -> TrainTree:
        return TrainTree(
            dataset=DatasetConfig(uri=dataset_uri),
            models=ModelsConfig(uri=str(tmp_path / "models")),
            train=TrainConfig(epochs=1, global_batch_size=6, num_streams=6),
        )

    build(with_images(tmp_path), 16)
    root = build(tmp_path, 20)
    trained = train_model(tree(root), Observer())
    assert gc_now(root, keep=1).expired == (1,)
    build(tmp_path, 16)
    roll_back(open_store(root), 2, "run")
    for version in (3, 5):
        again = train_model(tree(f"{root}@{version}"), Observer())
        assert again.skipped and (again.result, again.models_uri) == (trained.result, trained.models_uri)
    with pytest.raises(UsageError, match=r"no finished training .*@4"):
        finished_training(tree(f"{root}@4"))


class Observer(Recorder):
    """The driver's side of a recorder."""

    def step(self, step) -> None:
        self.steps.append(step)
