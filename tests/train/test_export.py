"""Exports: numbered and immutable, equal to the training model, and usable where none of our code is."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from shardmill.section import Section
from shardmill.stores import open_store
from tests.lab.datasets import make_dataset
from tests.services.faulty_store import FaultyStore, send_twice
from tests.train.ranks import SMOOTH_MODEL
from tests.train.training import ONE_LAYER
from train.backends.keras.backend import KERAS_FILE
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import Evaluation, TrainResult
from train.launching import LAUNCHERS
from train.models.user import source_sha256
from train.planning.auto import resolve
from train.planning.trainings import training_dir
from train.published.export import check_figures, export_training
from train.published.exported import EXPORTS, number_of_artifact, read_export, verify_export
from train.published.load import load_exported
from train.records import put_record, read_record, record_numbers
from train.reporting.run_log import RunLog
from train.results import read_result

MODELS = "tests.train.launch_models"

# Runs where no module of ours is: `-S` would hide the environment too, so it only checks that none was imported.
FOREIGN_READER = """
import json, sys
import numpy as np
import tensorflow as tf
import keras
folder, images = sys.argv[1], np.load(sys.argv[2])
served = tf.saved_model.load(folder + "/saved_model").signatures["serving_default"](images=tf.constant(images))
loaded = keras.models.load_model(folder + "/model.keras")(images)
assert not {"train", "shardmill", "tests"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([
    {"probabilities": np.asarray(each["probabilities"]).tolist(), "label": [x.decode() for x in each["label"].numpy()]}
    for each in (served, loaded)
]))
"""


CLASSES = Evaluation("test", 400, 0.5, 0.9, None, ())
NUMBERS = Evaluation("test", 400, 4.0, None, None, (), label_kind="float", mean_absolute_error=2.0)


@pytest.mark.parametrize(
    ("recorded", "changes", "precision", "rounding", "agrees"),
    [
        (CLASSES, {}, "off", 0.0, True),
        # One percent of the loss, absolute below a loss of 1; half a percent of the samples, or one sample.
        (CLASSES, {"loss": 0.51}, "off", 0.0, True),
        (CLASSES, {"loss": 0.511}, "off", 0.0, False),
        (replace(CLASSES, loss=2.0), {"loss": 2.02}, "off", 0.0, True),
        (replace(CLASSES, loss=2.0), {"loss": 2.021}, "off", 0.0, False),
        (CLASSES, {"accuracy": 0.895}, "off", 0.0, True),
        (CLASSES, {"accuracy": 0.906}, "off", 0.0, False),
        (replace(CLASSES, num_samples=10), {"accuracy": 0.8}, "off", 0.0, True),
        (replace(CLASSES, num_samples=10), {"accuracy": 0.7}, "off", 0.0, False),
        # Five times as much after 16 bits; what is asked of answers does not count here.
        (CLASSES, {"loss": 0.549, "accuracy": 0.876}, "bfloat16", 0.0, True),
        (CLASSES, {"loss": 0.551}, "bfloat16", 0.0, False),
        (CLASSES, {"loss": 0.511}, "off", 1.0, False),
        (CLASSES, {"num_samples": 399}, "off", 0.0, False),
        (CLASSES, {"loss": float("nan")}, "off", 0.0, False),
        # Errors have a unit: one percent of them, and what rounding of the answers makes of both.
        (NUMBERS, {"loss": 4.04, "mean_absolute_error": 1.98}, "off", 0.0, True),
        (NUMBERS, {"loss": 4.041}, "off", 0.0, False),
        (NUMBERS, {"mean_absolute_error": 2.021}, "off", 0.0, False),
        (NUMBERS, {"loss": 4.19, "mean_absolute_error": 2.09}, "float16", 0.0, True),
        # 0.04 + 0.1 * (2 * 2 + 0.1) of the loss, 0.02 + 0.1 of the error.
        (NUMBERS, {"loss": 4.449, "mean_absolute_error": 2.119}, "off", 0.1, True),
        (NUMBERS, {"loss": 4.451}, "off", 0.1, False),
        (NUMBERS, {"mean_absolute_error": 2.121}, "off", 0.1, False),
    ],
)
def test_an_export_answers_as_well_as_was_recorded(recorded, changes, precision, rounding, agrees):
    with nullcontext() if agrees else pytest.raises(IntegrityError, match="the export has loss"):
        check_figures(replace(recorded, **changes), recorded, precision, rounding=rounding)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    return open_dataset(make_dataset(tmp_path_factory.mktemp("data")))


def config_of(**train: object) -> TrainConfig:
    config = TrainConfig(**{"model": ONE_LAYER, "epochs": 2, "global_batch_size": 24, "num_streams": 6, **train})
    return resolve(config, SparkConfig()).config


def trained(dataset: Dataset, models_uri: Path, config: TrainConfig) -> TrainResult:
    source = source_sha256(config.model)
    task = WorkerTask(config, dataset.pin, str(models_uri), training_dir(config, dataset.pin, source), source)
    return LAUNCHERS["inline"].launch(task, SparkConfig(), RunLog(SilentObserver()))


def images_of(dataset: Dataset) -> np.ndarray:
    return np.stack([sample.image_HWC for sample in read_samples(dataset, "train", 20)])


@pytest.fixture(scope="module")
def models(dataset, tmp_path_factory) -> Path:
    """A models' root with export 1, of a small CNN with a dropout of ours."""
    root, config = tmp_path_factory.mktemp("models"), config_of(model=SMOOTH_MODEL["keras"])
    outcome = export_training(str(root), config, trained(dataset, root, config), "run-1")
    export, skipped = outcome.export, outcome.skipped
    assert (export.number, skipped) == (1, False)
    return root


def test_the_record_tells_all_that_there_is_to_know(models, dataset):
    record = read_export(str(models), 1).record
    assert record.dataset == dataset.pin
    assert (record.content_digest, record.class_names) == (
        dataset.manifest.content_digest,
        dataset.manifest.class_names,
    )
    assert record.normalize == dataset.manifest.normalize
    assert record.evaluation.split == "test" and record.evaluation.confused is None
    assert record.evaluation.accuracy == record.training_evaluation.accuracy
    assert record.evaluation.loss == pytest.approx(record.training_evaluation.loss, abs=1e-5)
    assert record.parity_max_abs_diff <= 1e-5
    assert record.keras_note == ""
    stored = {file.path for file in open_store(models).list(record.artifact_dir)}
    assert [file.path for file in record.files] == sorted(stored)
    assert f"{record.artifact_dir}/{KERAS_FILE}" in stored


@pytest.mark.starts("program")
def test_other_programs_read_both_forms(models, dataset, tmp_path):
    images = images_of(dataset)
    expected = load_exported(str(models), 1).predict(images)
    assert expected.dtype == np.float32
    np.save(tmp_path / "images.npy", images)
    folder = models / read_export(str(models), 1).record.artifact_dir
    command = [sys.executable, "-I", "-c", FOREIGN_READER, str(folder), str(tmp_path / "images.npy")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = dataset.manifest.class_names
    for form in json.loads(done.stdout.splitlines()[-1]):
        assert np.abs(np.array(form["probabilities"], np.float32) - expected).max() <= 1e-5
        assert form["label"] == [names[best] for best in expected.argmax(axis=1)]


def test_the_same_training_is_exported_once(models, dataset):
    config = config_of(model=SMOOTH_MODEL["keras"])
    result = read_result(open_store(models), training_dir(config, dataset.pin, source_sha256(config.model)))
    assert result is not None
    outcome = export_training(str(models), config, result, "run-2")
    assert (outcome.export.number, outcome.skipped, outcome.export.record.run_id) == (1, True, "run-1")
    assert record_numbers(open_store(models), EXPORTS) == [1]


def test_the_weights_that_the_result_speaks_of_are_exported(dataset, tmp_path):
    """The best epoch's and the last one's differ here: a rate this high makes the model worse in the end."""
    results = {}
    for choice in ("best", "last"):
        config = config_of(epochs=4, learning_rate=1.0, schedule="constant", export=choice)
        results[choice] = result = trained(dataset, tmp_path, config)
        record = export_training(str(tmp_path), config, result, "run").export.record
        assert (record.checkpoint, record.weights_sha256) == (result.checkpoint, result.weights_sha256)
        assert record.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-4, abs=1e-6)
    best, last = results["best"], results["last"]
    assert last.weights_epoch == 3 and last.checkpoint == last.last_checkpoint
    assert best.weights_epoch < 3, [epoch.validation.loss for epoch in best.history]
    assert best.weights_sha256 != last.weights_sha256


def test_an_export_that_answers_otherwise_than_was_recorded_is_none(dataset, tmp_path):
    """Edited code of the model, or an edited result: then nobody has measured what would be promoted."""
    config = config_of(epochs=1)
    result = trained(dataset, tmp_path, config)
    for changed in ({"accuracy": result.evaluation.accuracy - 0.3}, {"loss": result.evaluation.loss + 0.3}):
        said = replace(result, evaluation=replace(result.evaluation, **changed))
        with pytest.raises(IntegrityError) as refused:
            export_training(str(tmp_path), config, said, "run-1")
        for figure in (result.evaluation.accuracy, said.evaluation.accuracy, said.evaluation.loss):
            assert f"{figure:.4f}" in refused.value.what
    assert record_numbers(open_store(tmp_path), EXPORTS) == []


def test_what_a_killed_export_left_is_not_believed_and_in_nobodys_way(dataset, tmp_path, faulty):
    config = config_of(epochs=1)
    result = trained(dataset, tmp_path, config)

    class Killed(BaseException):
        pass

    def killed(store: FaultyStore, path: str, data: bytes) -> bool:
        raise Killed

    faulty["put_if_absent"] = killed
    with pytest.raises(Killed):
        export_training(f"faulty://{tmp_path}", config, result, "run-1")
    [left] = (tmp_path / "artifacts").iterdir()
    with pytest.raises(IntegrityError, match="no export of .* names artifacts/"):
        number_of_artifact(str(tmp_path), left.name)
    outcome = export_training(str(tmp_path), config, result, "run-2")
    export, skipped = outcome.export, outcome.skipped
    assert (export.number, skipped) == (1, False) and not export.record.artifact_dir.endswith(left.name)

    # Nor is an export that was damaged since: the same training is exported anew.
    (tmp_path / export.record.files[0].path).write_bytes(b"")
    again = export_training(str(tmp_path), config, result, "run-3")
    assert (again.export.number, again.skipped) == (2, False)
    verify_export(str(tmp_path), again.export)


def test_an_altered_file_is_named(models, tmp_path):
    record = read_export(str(models), 1).record
    file = next(models / each.path for each in record.files if each.path.endswith("saved_model.pb"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    try:
        with pytest.raises(IntegrityError, match=r"saved_model\.pb was altered"):
            load_exported(str(models), 1)
    finally:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    load_exported(str(models), 1)


def test_an_altered_record_is_named(models, tmp_path):
    path = "exports/00000001.json"
    text = (models / path).read_text()
    (tmp_path / "exports").mkdir()
    (tmp_path / path).write_text(text.replace("class_1", "class_9"))
    with pytest.raises(IntegrityError, match=r"exports/00000001\.json was altered"):
        read_export(str(tmp_path), 1)
    (tmp_path / path).write_text(text[: len(text) // 2])
    with pytest.raises(IntegrityError, match=r"exports/00000001\.json was altered"):
        read_export(str(tmp_path), 1)


def test_an_export_that_is_not_there_is_answered_with_those_that_are(models):
    with pytest.raises(UsageError, match="has no export 7; it has 1; "):
        read_export(str(models), 7)


@pytest.mark.parametrize(
    ("model", "keras_note"),
    [
        # Its layers tell all: written down without the class.
        ("with_arguments", ""),
        ("with_config", "load it with custom_objects for tests.train.launch_models.WithConfig"),
        ("with_tensorflow", "no .keras file: NotImplementedError"),
    ],
)
def test_users_own_model_classes_are_exported(dataset, tmp_path, model, keras_note):
    config = config_of(model=f"{MODELS}:{model}", epochs=1)
    export = export_training(str(tmp_path), config, trained(dataset, tmp_path, config), "run-1").export
    assert export.record.parity_max_abs_diff <= 1e-5
    assert export.record.keras_note.startswith(keras_note), export.record.keras_note
    assert bool(keras_note) == bool(export.record.keras_note)
    has_keras_file = any(file.path.endswith(KERAS_FILE) for file in export.record.files)
    assert has_keras_file == ("no .keras file" not in keras_note)
    probabilities_NK = load_exported(str(tmp_path), 1).predict(images_of(dataset))
    assert np.abs(probabilities_NK.sum(axis=1) - 1).max() < 1e-5
    if has_keras_file and not keras_note:
        import keras

        loaded = keras.models.load_model(tmp_path / export.record.artifact_dir / KERAS_FILE)
        assert np.abs(np.asarray(loaded(images_of(dataset))["probabilities"]) - probabilities_NK).max() <= 1e-5


def test_a_model_whose_configuration_is_drawn_is_built_for_its_export_as_for_its_training(dataset, tmp_path):
    config = config_of(model=f"{MODELS}:drawn", epochs=1, seed=3)
    result = trained(dataset, tmp_path, config)
    assert export_training(str(tmp_path), config, result, "run-1").export.record.weights_sha256 == result.weights_sha256


def test_a_model_that_computes_something_else_each_time_is_not_exported(dataset, tmp_path):
    config = config_of(model=f"{MODELS}:moody", epochs=1)
    result = trained(dataset, tmp_path, config)
    with pytest.raises(TrainingError, match="the exported model differs from the training model by 0"):
        export_training(str(tmp_path), config, result, "run-1")
    assert record_numbers(open_store(tmp_path), EXPORTS) == []


def test_an_export_computes_in_float32_however_it_was_trained(dataset, tmp_path):
    config = config_of(mixed_precision="bfloat16", epochs=1)
    export = export_training(str(tmp_path), config, trained(dataset, tmp_path, config), "run-1").export
    assert export.record.parity_max_abs_diff <= 1e-5
    probabilities_NK = load_exported(str(tmp_path), 1).predict(images_of(dataset))
    assert np.abs(probabilities_NK.sum(axis=1) - 1).max() < 1e-5


def test_a_damaged_checkpoint_is_not_exported(dataset, tmp_path):
    config = config_of(epochs=1)
    result = trained(dataset, tmp_path, config)
    weights = tmp_path / result.checkpoint / "weights.npz"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(IntegrityError, match=r"training's checkpoint .*step-.* is missing or damaged"):
        export_training(str(tmp_path), config, result, "run-1")


class Note(Section):
    writer: int


def test_a_record_whose_reply_was_lost_finds_itself(tmp_path, faulty):
    faulty["put_if_absent"] = send_twice
    store = open_store(f"faulty://{tmp_path}")
    assert put_record(store, "notes", 1, Note(writer=1))
    # Another writer's record is another attempt, even if it says the same.
    assert not put_record(store, "notes", 1, Note(writer=1))


def test_every_number_has_one_writer(tmp_path):
    store = open_store(tmp_path)
    won: list[tuple[int, int]] = []

    def write(writer: int) -> None:
        for number in range(1, 21):
            if put_record(store, "notes", number, Note(writer=writer)):
                won.append((number, writer))

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in won) == list(range(1, 21)) == record_numbers(store, "notes")
    assert all(read_record(store, "notes", number, Note).writer == writer for number, writer in won)
