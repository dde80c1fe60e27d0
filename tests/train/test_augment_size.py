"""`train.augment.size`: one size in training, evaluation, the export and predictions, smaller than the stored one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from tests.lab.datasets import make_dataset
from train.backends.backend import model_spec
from train.config import TrainConfig
from train.planning.preflight import check_trainable
from train.published.evaluation import evaluate_on
from train.published.export import export_training
from train.published.gate import promote_export
from train.published.load import load_exported
from train.published.predict import predict_images
from train.reporting.run_log import RunLog
from train.settings.gate import GateConfig
from train.training import train_model
from train.tree import TrainTree


def tree_of(folder: Path, size: int, epochs: int = 4) -> TrainTree:
    augment = {"preset": "imagenet", "random_flip": False, "min_crop_area": 0.5, "size": size}
    return TrainTree(
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        models=ModelsConfig(uri=str(folder / "models")),
        train=TrainConfig(epochs=epochs, learning_rate=3e-3, global_batch_size=24, num_streams=6, augment=augment),
    )


def export(tree: TrainTree):
    trained = train_model(tree, RunLog(SilentObserver()))
    return export_training(trained.models_uri, tree.train, trained.result, "run").export


@pytest.fixture
def of_size_20(tmp_path):
    make_dataset(tmp_path, image_size=24)
    make_dataset(tmp_path / "other", image_size=24, num_images=90)
    return export(tree_of(tmp_path, 20))


def test_training_export_and_predictions_have_one_size(of_size_20, tmp_path):
    models, gate, record = str(tmp_path / "models"), GateConfig(min_accuracy=0.5), of_size_20.record
    assert (record.size, record.image_shape_HWC, record.normalize.image_size) == (20, (20, 20, 3), 24)
    assert record.evaluation is not None and record.evaluation.accuracy > 0.8
    assert promote_export(models, of_size_20, gate, "run").gate.decision == "promoted"

    dataset = open_dataset(str(tmp_path / "dataset"))
    stored = {sample.source: sample.image_HWC for sample in read_samples(dataset, "test", 8)}
    predictions = predict_images(models, [str(tmp_path / "images" / source) for source in stored])
    centres_NHWC = np.stack([image_HWC[2:22, 2:22] for image_HWC in stored.values()])
    expected_NK = load_exported(models, 1).predict(centres_NHWC)
    found_N = np.array([each.probability for each in predictions])
    assert np.abs(found_N - expected_NK.max(axis=1)).max() < 1e-6

    # Another dataset of the same stored size, and a model of another size on the same stored images.
    on_other = evaluate_on(models, of_size_20, str(tmp_path / "other" / "dataset"), is_new=False).evaluation
    assert on_other is not None and on_other.accuracy > 0.8
    whole = export(tree_of(tmp_path, 0, epochs=2))
    assert whole.record.image_shape_HWC == (24, 24, 3)
    assert promote_export(models, whole, GateConfig(min_accuracy=0.5), "run").gate.current_figure is not None


def test_a_larger_size_than_stored_is_refused_before_anything_starts(tiny_uri):
    dataset = open_dataset(tiny_uri)
    config = TrainConfig(augment={"size": 17}, num_workers=1, num_streams=8)
    with pytest.raises(UsageError, match="augment.size = 17, but the stored images have 16 x 16 pixels"):
        check_trainable(config, dataset)
    spec = model_spec(dataset.manifest, TrainConfig(augment={"size": 12}))
    assert spec.image_shape_HWC == (12, 12, 3)
