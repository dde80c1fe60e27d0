"""Exports: numbered, immutable, equal to the training model, probabilities, and usable without our code."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOptionalCall=false, reportOptionalMemberAccess=false, reportOptionalOperand=false
from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from shardmill.section import Section
from shardmill.stores import open_store
from tests.lab.datasets import make_dataset
from tests.services.faulty_store import FaultyStore, send_twice
from tests.train.learners import TORCH_MODELS, batch_of
from tests.train.ranks import SMOOTH_MODEL
from tests.train.training import ONE_LAYER
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.keras.serving import KERAS_FILE
from train.backends.model_spec import InputScale, ModelSpec
from train.backends.torch.model import classifier_of
from train.backends.torch.serving import LAYER_OUTPUT, load_program, served_module, write_program
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import Evaluation, TrainResult
from train.contracts.world import World
from train.labels import LabelSpec
from train.launching import LAUNCHERS
from train.models.user import source_sha256
from train.planning.setup import resolve
from train.planning.trainings import training_dir
from train.published.export import check_metrics, export_training
from train.published.exported import EXPORTS, load_exported, number_of_artifact, read_export, verify_export
from train.records import put_record, read_record, record_numbers
from train.reporting.run_log import RunLog
from train.results import read_result

if TYPE_CHECKING:
    import torch


MODELS = "tests.train.models_under_test"
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
        check_metrics(replace(recorded, **changes), recorded, precision, rounding=rounding)


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


def test_the_record_has_all_that_there_is_to_know(models, dataset):
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
        ("with_config", "load it with custom_objects for tests.train.models_under_test.WithConfig"),
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


PROGRAM = Path(__file__).parents[1] / "programs" / "answers_of_pt2.py"


@pytest.mark.starts("program")
def test_standardization_and_class_names_are_inside(dataset, tmp_path):
    config = config_of(model=SMOOTH_MODEL["torch"], epochs=1)
    record = export_training(str(tmp_path), config, trained(dataset, tmp_path, config), "run").export.record
    images = images_of(dataset)
    expected = load_exported(str(tmp_path), 1).predict(images)
    np.save(tmp_path / "images.npy", images)
    [file] = (tmp_path / record.artifact_dir).rglob("*.pt2")
    # In another folder and isolated, so that no module of ours is there.
    command = [sys.executable, "-I", str(PROGRAM), str(file), str(tmp_path / "images.npy")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told, names = json.loads(done.stdout.splitlines()[-1]), dataset.manifest.class_names
    assert np.abs(np.array(told["probabilities"], np.float32) - expected).max() <= 1e-5
    assert told["label"] == [names[best] for best in expected.argmax(axis=1)]


SHAPE_HWC = (8, 8, 3)


def net() -> torch.nn.Sequential:
    """Standardized images_NCHW -> logits of three classes."""
    from torch import manual_seed, nn

    manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    layers = {"features": features, "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten(), "head": nn.Linear(4, 3)}
    return nn.Sequential(OrderedDict(layers))


@pytest.fixture
def program(tmp_path: Path) -> Path:
    spec = ModelSpec(SHAPE_HWC, LabelSpec("class", ("a", "b", "c")), InputScale((0.0,) * 3, (255.0,) * 3))
    classifier = classifier_of(net(), is_keras=False, spec=spec)
    write_program(served_module(classifier, "class", are_logits=True), spec, "net", tmp_path / "program")
    return tmp_path / "program"


def test_a_modules_output_comes_with_the_answers(program: Path):
    import torch

    images_NHWC = np.random.default_rng(0).integers(0, 256, (5, *SHAPE_HWC), np.uint8)
    model = net().eval()
    features_of, first_of, pool_of = (model.get_submodule(name) for name in ("features", "features.0", "pool"))
    with torch.no_grad():
        pixels_NCHW = torch.from_numpy(images_NHWC).permute(0, 3, 1, 2).float() / 255
        features = features_of(pixels_NCHW)
        expected = {"features": features, "features.0": first_of(pixels_NCHW), "pool": pool_of(features)}
    for name, output in expected.items():
        predictions_NK, layer_ND = LAYER_OUTPUT.load(program, name)(images_NHWC)
        assert np.allclose(layer_ND, output.flatten(1).numpy(), atol=1e-6), name
        assert np.allclose(predictions_NK, load_program(program).predictions(images_NHWC), atol=1e-6)


def test_a_module_that_is_not_there_is_named_beside_those_that_are(program: Path):
    with pytest.raises(UsageError, match="no layer 'pol'; expected one of its 6 layers; .* did you mean 'pool'"):
        LAYER_OUTPUT.load(program, "pol")


SHAPE = (8, 8, 3)
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
SOFTMAXES = ["nested_softmax", "ops_softmax", "softmax_of_zeros", "softmax_then_identity", "own_softmax_layer"]
SIGMOIDS = ["nested_sigmoid", "ops_sigmoid"]
LOGITS = ["logits", "zeros", "constant_distribution", "small_relu", "tanh"]


def learner(backend: str, factory: str, labels: LabelSpec, **train: object) -> Any:
    BACKENDS[backend].start(World(), 0)
    module = MODELS if backend == "keras" else TORCH_MODELS
    config = TrainConfig(model=f"{module}:{factory}", optimizer="sgd", **train)
    return BACKENDS[backend].build(config, ModelSpec(SHAPE, labels, InputScale((127.5,) * 3, (64.0,) * 3)))


def classes(number: int) -> LabelSpec:
    return LabelSpec("class", tuple("abcdefghij"[:number]))


def several(number: int) -> LabelSpec:
    return LabelSpec("multi_label", tuple("abcdefghij"[:number]))


@EACH_BACKEND
@pytest.mark.parametrize("factory", SOFTMAXES)
@pytest.mark.parametrize("num_classes", [2, 10])
def test_a_softmax_is_recognised_wherever_it_is(backend, factory, num_classes):
    one = learner(backend, factory, classes(num_classes))
    assert not one.outputs_are_logits
    images_NHWC = batch_of(SHAPE).images_NHWC
    # Not a second time in what an export answers.
    np.testing.assert_array_equal(one.predictions(images_NHWC), one.outputs(images_NHWC))


@EACH_BACKEND
@pytest.mark.parametrize("factory", SIGMOIDS)
@pytest.mark.parametrize("num_classes", [1, 2, 10])
def test_a_sigmoid_is_recognised_wherever_it_is(backend, factory, num_classes):
    assert not learner(backend, factory, several(num_classes)).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("factory", LOGITS)
@pytest.mark.parametrize("labels", [classes(2), classes(10), several(1), several(2), several(10)], ids=str)
def test_logits_are_no_probabilities_though_they_look_so_at_first(backend, factory, labels):
    assert learner(backend, factory, labels).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("num_classes", [2, 10])
def test_logarithms_of_probabilities_are_logits(backend, num_classes):
    assert learner(backend, "log_softmax", classes(num_classes)).outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("factory", ["softmax_of_zeros", "zeros", "logits"])
def test_looking_leaves_the_model_as_it_was(backend, factory):
    seen, said = (
        learner(backend, factory, classes(3), model_outputs=each).arrays(StatePart.WEIGHTS)
        for each in ("auto", "logits")
    )
    assert [array.tobytes() for array in seen] == [array.tobytes() for array in said]


@EACH_BACKEND
def test_what_cannot_be_right_is_refused_with_the_key_to_set(backend):
    with pytest.raises(
        UsageError, match=r"do not always add up to 1; .*one class; .*set train.model_outputs to \"logits\""
    ):
        learner(backend, "ops_sigmoid", classes(3))
    assert learner(backend, "ops_sigmoid", classes(3), model_outputs="logits").outputs_are_logits
    for factory, labels, found in (
        ("logits", classes(3), "not all from 0 to 1"),
        ("ops_sigmoid", classes(3), "each from 0 to 1, but do not add up to 1"),
        ("tanh", several(3), "not all from 0 to 1"),
    ):
        with pytest.raises(UsageError, match=rf"train.model_outputs = \"probabilities\", .*{found}.*\"auto\""):
            learner(backend, factory, labels, model_outputs="probabilities")
    assert not learner(backend, "ops_softmax", classes(3), model_outputs="probabilities").outputs_are_logits


def test_a_compiled_loss_that_contradicts_the_outputs_is_refused():
    with pytest.raises(
        UsageError, match="loss for probabilities, but returns any numbers; .*from_logits=True.*train.loss"
    ):
        learner("keras", "logits_without_from_logits", classes(3))
    assert learner("keras", "logits_without_from_logits", classes(3), loss="softmax").outputs_are_logits
    with pytest.raises(UsageError, match="from_logits=True, but returns probabilities; .*from_logits=False"):
        learner("keras", "softmax_with_from_logits", classes(3))
    assert not learner("keras", "softmax_with_from_logits", classes(3), loss="softmax").outputs_are_logits


@EACH_BACKEND
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_softmax_in_sixteen_bits_is_one(backend, precision):
    assert not learner(backend, "ops_softmax", classes(10), mixed_precision=precision).outputs_are_logits
