"""Every backend keeps what `train.backends.backend` says: sums that are gradients, state that comes back, exports."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalOperand=false
from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.loader.samples import read_samples
from tests.train.forked_ranks import launch_forked
from tests.train.learners import CLIFF, LINEAR, SHAPE, STATEFUL, TORCH_MODELS, batch_of, learner, state
from tests.train.training import Recorder, check_terms, task_of, train_here
from train.backends import BACKENDS
from train.backends.backend import StatePart
from train.config import TrainConfig
from train.planning.auto import resolve
from train.planning.trainings import training_dir
from train.published.export import export_training
from train.published.load import load_exported
from train.reporting.run_log import RunLog


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_state_of_one_moment_gives_the_same_next_step(name, optimizer):
    batch, config = batch_of(SHAPE, num_rows=6), {"optimizer": optimizer}
    first = learner(name, STATEFUL[name], **config)
    untouched = state(first)
    first.apply(first.gradients(batch, 6, 1.0), 0.1)
    saved = {part: first.arrays(part) for part in StatePart}
    outcome = first.apply(first.gradients(batch, 6, 1.0), 0.1)
    after = state(first)

    second = learner(name, STATEFUL[name], seed=1, **config)
    assert state(second)[StatePart.WEIGHTS] != untouched[StatePart.WEIGHTS]
    for part, arrays in saved.items():
        second.assign(part, arrays, "the first")
    again = second.apply(second.gradients(batch, 6, 1.0), 0.1)
    assert (again, state(second)) == (outcome, after)
    assert second.weights_sha256() == first.weights_sha256()
    assert second.config_sha256 == first.config_sha256


@pytest.mark.parametrize("name", BACKENDS)
def test_the_parts_of_a_batch_add_up_to_its_gradient(name):
    whole = batch_of(SHAPE, num_rows=6)
    one = learner(name, LINEAR[name], label_smoothing=0.1)
    expected = [np.array(each) for each in one.gradients(whole, 6, 1.0)]
    parts = []
    for rows in (slice(0, 4), slice(4, 6)):
        names = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
        part = replace(whole, **{each: getattr(whole, each)[rows] for each in names})
        parts.append([np.array(each) for each in one.gradients(part, 6, (rows.stop - rows.start) / 6)])
    for total, left, right in zip(expected, *parts, strict=True):
        np.testing.assert_allclose(left + right, total, rtol=1e-4, atol=1e-6)


def test_backends_agree_on_loss_and_gradient():
    """The same linear model with the same weights, in each framework."""
    kernel = np.random.default_rng(0).normal(0, 0.05, (16 * 16 * 3, 3)).astype(np.float32)
    bias, batch = np.array([0.1, 0.2, 0.3], np.float32), batch_of(SHAPE, num_rows=6)
    # PyTorch has channels first, and a kernel's outputs first.
    in_torch = kernel.reshape(16, 16, 3, 3).transpose(3, 2, 0, 1).reshape(3, -1)
    found = {}
    for name, weights in {"keras": [kernel, bias], "torch": [in_torch, bias]}.items():
        one = learner(name, LINEAR[name], label_smoothing=0.2, optimizer="sgd", gradient_clip_norm=0.5)
        one.assign(StatePart.WEIGHTS, [np.ascontiguousarray(each) for each in weights], "the test")
        outcome = one.apply(one.gradients(batch, 6, 1.0), 0.01)
        after, bias_after = one.arrays(StatePart.WEIGHTS)
        if name == "torch":
            after = after.reshape(3, 3, 16, 16).transpose(2, 3, 1, 0).reshape(-1, 3)
        found[name] = (outcome, after, bias_after)
    (one, after, bias_after), (other, other_after, other_bias) = found["keras"], found["torch"]
    assert one.loss == pytest.approx(other.loss, rel=1e-5) and one.num_correct == other.num_correct
    assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4) and one.gradient_norm > 0.5
    np.testing.assert_allclose(after, other_after, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(bias_after, other_bias, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_loss_that_is_not_a_number_changes_nothing(name):
    one = learner(name, LINEAR[name])
    one.assign(StatePart.WEIGHTS, [np.full_like(each, np.inf) for each in one.arrays(StatePart.WEIGHTS)], "the test")
    before = state(one)
    assert not one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), None).is_applied
    assert state(one) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_a_gradient_without_bounds_changes_nothing_though_the_loss_is_finite(name):
    one = learner(name, CLIFF[name])
    before = state(one)
    outcome = one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), None)
    assert (np.isfinite(outcome.loss), outcome.gradient_norm, outcome.is_applied) == (True, np.inf, False)
    assert state(one) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_ranks_draw_numbers_of_their_own(name):
    one = learner(name, STATEFUL[name])
    states = [[array.tobytes() for array in one.arrays(StatePart.OWN)]]
    for rank in (1, 2):
        one.decorrelate(rank)
        states.append([array.tobytes() for array in one.arrays(StatePart.OWN)])
    changed = [len(set(of_array)) for of_array in zip(*states, strict=True)]
    assert sorted(changed) == [*[1] * (len(changed) - 1), 3], "the generator alone, and anew for each rank"


@pytest.mark.parametrize("name", BACKENDS)
def test_state_of_another_model_is_refused(name):
    one = learner(name, LINEAR[name])
    for part in (StatePart.WEIGHTS, StatePart.OPTIMIZER):
        arrays = one.arrays(part)
        with pytest.raises(UsageError, match="a file holds"):
            one.assign(part, arrays[1:], "a file")
        with pytest.raises(UsageError, match="a file holds"):
            one.assign(part, [np.zeros((2, 2), np.float32), *arrays[1:]], "a file")


@pytest.mark.parametrize("name", BACKENDS)
def test_an_export_answers_as_the_model_does(name, tmp_path):
    one = learner(name, STATEFUL[name])
    one.apply(one.gradients(batch_of(SHAPE), 4, 1.0), 0.1)
    assert one.export_backend == name
    one.write_served(tmp_path)
    served = BACKENDS[name].load_served(tmp_path)
    for num_rows in (1, 5):
        images_NHWC = batch_of(SHAPE, num_rows).images_NHWC
        answers_NK = served.answers(images_NHWC)
        assert answers_NK.shape == (num_rows, 3) and answers_NK.dtype == np.float32
        np.testing.assert_allclose(answers_NK.sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(answers_NK, one.answers(images_NHWC), atol=1e-5)
    one.write_portable(tmp_path, batch_of(SHAPE).images_NHWC, 1e-5)
    assert any(path.is_file() for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("no_model", r"the factory returned builtins.str; expected an nn.Module"),
        ("one_class_too_many", "returns an output of shape \\(2, 4\\) for 2 images; expected 3 outputs"),
        ("with_features", "returns a dict; expected one tensor of shape \\(N, 3\\); return only the outputs"),
        ("frozen", r"has no trainable variables"),
    ],
)
def test_a_module_that_does_not_fit_is_refused(factory, message):
    with pytest.raises(UsageError, match=message):
        learner("torch", f"{TORCH_MODELS}:{factory}")


def test_a_softmax_at_the_end_gives_probabilities():
    assert not learner("torch", f"{TORCH_MODELS}:with_softmax").outputs_are_logits
    assert learner("torch", f"{TORCH_MODELS}:softmax_elsewhere").outputs_are_logits


def test_a_module_that_cannot_be_exported_is_refused_before_its_first_step(tiny_uri, tmp_path):
    recorder = Recorder()
    with pytest.raises(UsageError, match=r"torch.export cannot follow train.model = .*branching'"):
        train_here(tiny_uri, tmp_path, recorder, model=f"{TORCH_MODELS}:branching")
    assert not recorder.steps


def test_a_trial_of_the_export_changes_nothing():
    one = learner("torch", STATEFUL["torch"])
    before = state(one)
    one.check_exportable()
    assert state(one) == before


def resolved(config: TrainConfig) -> TrainConfig:
    return resolve(config, SparkConfig()).config


def backend_of(config: TrainConfig) -> str:
    return resolved(config).backend


def test_the_backend_follows_from_strategy_and_model():
    assert backend_of(TrainConfig()) == "keras"
    assert backend_of(TrainConfig(model=LINEAR["torch"])) == "torch"
    assert backend_of(TrainConfig(model=LINEAR["keras"])) == "keras"
    assert backend_of(TrainConfig(strategy="torch_ddp")) == "torch"
    assert backend_of(TrainConfig(backend="torch")) == "torch"
    with pytest.raises(UsageError, match=r"'horovod' with the backend 'torch', which train.model = .*'torch_ddp'"):
        backend_of(TrainConfig(model=LINEAR["torch"], strategy="horovod"))
    with pytest.raises(UsageError, match=r"'torch_ddp' with the backend 'keras'; it runs with torch; set train.strat"):
        backend_of(TrainConfig(strategy="torch_ddp", backend="keras"))


def test_a_launcher_refuses_a_strategy_that_it_cannot_start():
    config = TrainConfig(strategy="torch_ddp", launcher="horovod_spark", num_workers=2)
    with pytest.raises(UsageError, match=r"'torch_ddp' with train.launcher = 'horovod_spark'; .* set .* to 'local'"):
        check_terms(config, SparkConfig(master="local[2]"))


def test_a_keras_model_is_not_trained_by_torch_in_the_process_that_exports_it():
    for model in ("small_cnn", LINEAR["keras"]):
        with pytest.raises(UsageError, match="a process can load only one Keras backend; set train.launcher = 'local'"):
            check_terms(TrainConfig(model=model, backend="torch", launcher="inline"), SparkConfig())
    assert check_terms(TrainConfig(model=LINEAR["torch"]), SparkConfig()).config.backend == "torch"
    assert check_terms(TrainConfig(backend="torch"), SparkConfig()).config.launcher == "local"


def test_a_torch_training_is_exported_and_loaded_by_torch(tiny_uri, tmp_path):
    config = TrainConfig(model=LINEAR["torch"], epochs=8, learning_rate=0.01)
    result = train_here(tiny_uri, tmp_path, **config.model_dump(exclude_unset=True))
    outcome = export_training(str(tmp_path), config, result, "run")
    record = outcome.export.record
    assert (record.backend, record.parity_max_abs_diff <= 1e-5) == ("torch", True)
    assert record.evaluation.accuracy == result.evaluation.accuracy == 1.0
    model = load_exported(str(tmp_path), outcome.export.number)
    assert model.predict(batch_of(SHAPE).images_NHWC).shape == (4, 3)


@pytest.mark.starts("ranks")
def test_a_keras_model_trained_by_torch_is_exported_by_keras(tiny_uri, tmp_path):
    """A rank of `torch_ddp` trains the demo's model; the process that exports has TensorFlow."""
    task = task_of(tiny_uri, tmp_path, strategy="torch_ddp", launcher="local", num_workers=1, epochs=1)
    result = launch_forked(task, RunLog(SilentObserver()))
    assert result.export_backend == "keras"
    export = export_training(str(tmp_path), task.config, result, "run").export
    assert export.record.backend == "keras"
    assert export.record.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-5)


@pytest.mark.starts("program")
def test_a_torch_rank_imports_no_tensorflow(tiny_uri, tmp_path):
    command = [sys.executable, "-m", "tests.programs.imports_of_a_torch_training", f"{TORCH_MODELS}:linear"]
    done = subprocess.run([*command, tiny_uri, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1]) == [], done.stderr[-1000:]


def test_another_framework_is_another_training(tiny_uri):
    pin = open_dataset(tiny_uri).pin
    folders = {
        (strategy, backend): training_dir(resolved(TrainConfig(strategy=strategy, backend=backend)), pin, "")
        for strategy, backend in (("single", "auto"), ("single", "keras"), ("horovod", "auto"), ("torch_ddp", "auto"))
    }
    assert len(set(folders.values())) == 2
    assert folders["torch_ddp", "auto"] == training_dir(resolved(TrainConfig(backend="torch")), pin, "")


def test_a_sample_for_which_the_model_gives_no_number_is_named(tiny_uri, tmp_path, monkeypatch):
    samples = read_samples(open_dataset(tiny_uri), "train", 1000)
    *_, second, brightest = sorted(samples, key=lambda sample: int(sample.image_HWC.astype(int).sum()))
    from tests.train import torch_non_finite_models

    monkeypatch.setattr(torch_non_finite_models.Fragile, "limit", float(second.image_HWC.astype(int).sum()) + 0.5)
    name, still = format_sample_id(brightest.sample_id), {"random_crop_padding": 0}
    with pytest.raises(TrainingError, match=rf"not applied; the model's outputs are not finite for 1 samples: {name};"):
        train_here(
            tiny_uri, tmp_path, model="tests.train.torch_non_finite_models:fragile", standardize=False, augment=still
        )
