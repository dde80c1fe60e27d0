"""Image files to labels, as the training images went."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from shardmill.options import DecodeLimits
from tests.lab.datasets import make_dataset
from train.config import TrainConfig
from train.published.export import export_training
from train.published.gate import promote_export
from train.published.load import load_exported
from train.published.predict import MAX_BATCH_SIZE, open_model, predict_files, predict_images
from train.reporting.run_log import RunLog
from train.settings.gate import GateConfig
from train.training import finished_training, train_model
from train.tree import TrainTree


def tree_of(folder: Path) -> TrainTree:
    return TrainTree(
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        models=ModelsConfig(uri=str(folder / "models")),
        train=TrainConfig(epochs=4, learning_rate=3e-3, global_batch_size=24, num_streams=6),
        gate=GateConfig(min_accuracy=0.9),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """`images/`, `dataset/`, and `models/` with one promoted export of a model that has learned them."""
    folder = tmp_path_factory.mktemp("data")
    make_dataset(folder, encoding="jpeg")
    tree = tree_of(folder)
    trained = train_model(tree, RunLog(SilentObserver()))
    (folder / "temporary").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
        exported = export_training(trained.models_uri, tree.train, trained.result, "run")
    assert promote_export(exported.models_uri, exported.export, tree.gate, "run").gate.decision == "promoted"
    # 48 megapixels in some kilobytes: as large as is allowed, and 144 MB when it is decoded.
    assert cv2.imwrite(str(folder / "bomb.png"), np.zeros((6000, 8000, 3), np.uint8))
    return folder


def test_files_get_the_labels_of_their_folders_and_the_probabilities_of_the_stored_images(folder):
    stored = {sample.source: sample for sample in read_samples(open_dataset(str(folder / "dataset")), "train", 80)}
    assert len(stored) > MAX_BATCH_SIZE
    paths = [str(folder / "images" / source) for source in stored]
    predictions = predict_images(str(folder / "models"), paths)
    assert [each.path for each in predictions] == paths
    right = [each.label == Path(each.path).parent.name for each in predictions]
    assert np.mean(right) > 0.9
    images_NHWC = np.stack([sample.image_HWC for sample in stored.values()])
    expected_NK = load_exported(str(folder / "models"), 1).predict(images_NHWC)
    given_N = np.array([each.probability for each in predictions])
    assert np.abs(given_N - expected_NK.max(axis=1)).max() < 1e-6


def test_exports_and_predictions_leave_no_temporary_files(folder, monkeypatch):
    temporary = folder / "temporary"
    assert not _left_in(temporary), "left by the export"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    [prediction] = predict_images(str(folder / "models"), [str(next((folder / "images").rglob("*.png")))])
    assert prediction.label and not _left_in(temporary)


def test_without_tensorflow_the_extra_is_named_and_nothing_is_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(UsageError, match=r"needs TensorFlow: .*pip install '\.\[tensorflow\]'"):
        open_model(str(folder / "models"))
    assert not _left_in(tmp_path)


def test_without_tensorflow_nothing_is_exported_and_the_extra_is_named(folder, monkeypatch):
    tree = tree_of(folder)
    trained = finished_training(tree)
    shutil.move(folder / "models/exports", folder / "exports")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    try:
        with pytest.raises(UsageError, match=r"needs TensorFlow: .*pip install '\.\[tensorflow\]'"):
            export_training(trained.models_uri, tree.train, trained.result, "run")
    finally:
        shutil.move(folder / "exports", folder / "models/exports")


def test_what_the_etl_would_reject_is_rejected_for_the_same_reason(folder, tmp_path):
    good = next((folder / "images").rglob("*.png"))
    (tmp_path / "page.jpg").write_bytes(b"<html></html>")
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "cut.png").write_bytes(good.read_bytes()[:200])
    paths = [str(tmp_path / "page.jpg"), str(good), str(tmp_path / "empty.png"), str(tmp_path / "none.png")]
    paths.append(str(tmp_path / "cut.png"))
    predictions = predict_images(str(folder / "models"), paths)
    assert [each.path for each in predictions] == paths
    reasons = [each.rejection.split(":")[0] for each in predictions]
    assert reasons == ["not_an_image", "", "empty_file", "missing", "truncated"]
    assert [bool(each.label) for each in predictions] == [False, True, False, False, False]


def test_what_is_no_regular_file_is_rejected_without_waiting_for_it(folder, tmp_path):
    os.mkfifo(tmp_path / "fifo.jpg")
    good = next((folder / "images").rglob("*.png"))
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 50_000_001)
    paths = [str(tmp_path / "fifo.jpg"), "/dev/zero", "/dev/null", str(tmp_path / "large.png"), "/proc/self/mem"]
    predictions = predict_images(str(folder / "models"), [*paths, str(good)])
    reasons = [each.rejection.split(":")[0] for each in predictions]
    assert reasons == [*["not_regular_file"] * 3, "too_large_bytes", "unreadable", ""]


@pytest.mark.starts("decoder")
def test_an_image_that_takes_too_much_is_rejected_and_the_next_one_is_not(folder):
    """Decoding happens in a process of its own, under limits."""
    good = [str(each) for each in sorted((folder / "images").rglob("*.png"))[:2]]
    model = open_model(str(folder / "models"))
    assert [each.rejection for each in predict_files(model, good)] == ["", ""]
    too_little = predict_files(
        model, [str(folder / "bomb.png"), good[0]], limits=DecodeLimits.model_construct(decode_memory_bytes=20_000_000)
    )
    assert [each.rejection.split(":")[0] for each in too_little] == ["decoder_memory", ""]
    # The ETL's config keys have no effect here, so none is named.
    assert "etl." not in too_little[0].rejection


def test_folders_are_their_files_in_order(folder, tmp_path):
    good = sorted((folder / "images").rglob("*.png"))[:3]
    for place, source in zip(("b/2.png", "a/deep/1.png", "a.png"), good, strict=True):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / place)
    (tmp_path / ".hidden.png").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    predictions = predict_images(str(folder / "models"), [str(good[0]), str(tmp_path)], num_top=2)
    below = [os.path.relpath(each.path, tmp_path) for each in predictions[1:]]
    assert below == ["a.png", "a/deep/1.png", "b/2.png"] and predictions[0].path == str(good[0])
    for each in predictions:
        assert each.top[0].label == each.label and len(each.top) == 2
        assert each.top[0].probability >= each.top[1].probability
    with pytest.raises(UsageError, match="no files below"):
        predict_images(str(folder / "models"), [str(tmp_path / "empty")])


def test_a_model_is_named_by_root_by_number_or_by_its_folder(folder):
    models = folder / "models"
    [artifact] = (models / "artifacts").iterdir()
    for name in (str(models), f"{models}/", f"{models}@1", str(artifact), f"{artifact}/saved_model"):
        assert open_model(name).export.number == 1


def test_a_model_that_is_not_there_is_refused(folder, tmp_path):
    with pytest.raises(UsageError, match="holds no exports; expected a models folder or URI; .*WORKDIR/models"):
        open_model(str(tmp_path))
    with pytest.raises(UsageError, match=f"{folder} holds no exports; .*; did you mean {folder}/models\\?"):
        open_model(str(folder))
    with pytest.raises(UsageError, match="has no export 9"):
        open_model(f"{folder / 'models'}@9")
    with pytest.raises(IntegrityError, match="no export of .* names artifacts/other"):
        open_model(str(folder / "models" / "artifacts" / "other"))


def _left_in(temporary: Path) -> list[Path]:
    # AutoGraph writes the code that it generates into files, which TensorFlow deletes when the process ends; sometimes
    # Python has compiled one into `__pycache__`.
    files = [path for path in temporary.rglob("*") if not path.is_dir() or path.name != "__pycache__"]
    return [path for path in files if not path.name.startswith("__autograph_generated_file")]
