"""Mixup and cutmix in a training: shares of classes as targets in both backends, refused where they mean nothing."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.observer import SilentObserver
from tests.train.forked_ranks import launch_forked
from tests.train.learners import THREE, batch_of
from tests.train.test_parameter_server import Watcher
from tests.train.test_parameter_server import launch as launch_served
from tests.train.training import MODELS, Recorder, task_of, train_here
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec, synthetic_batch
from train.config import TrainConfig
from train.contracts.world import World
from train.labels import LabelSpec, check_labels
from train.planning.preflight import check_trainable
from train.readers.silos import SiloBatches
from train.reporting.run_log import RunLog

SHAPE = (16, 16, 3)
LINEAR = {"keras": f"{MODELS}:linear", "torch": "tests.train.torch_models:linear"}
SOFTMAX = {"keras": f"{MODELS}:compiled_categorical", "torch": "tests.train.torch_models:linear"}
MIXES = {"mixup_alpha": 0.4, "cutmix_alpha": 1.0}


def step(backend: str, batch, spec: ModelSpec, **config):
    """The outcome of the first step."""
    BACKENDS[backend].start(World(), 0)
    learner = BACKENDS[backend].build(TrainConfig(optimizer="sgd", augment=MIXES, **config), spec)
    return learner.apply(learner.gradients(batch, 5, 1.0), 0.01)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [(), (0.5, 1.0, 3.0)])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_loss_of_shares_is_the_mean_of_the_classes_losses(name, weights, smoothing):
    """Cross-entropy is linear in its targets."""
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
    batch = replace(batch_of(SHAPE, 6), weights_N=np.float32([1, 1, 1, 1, 1, 0]))
    first_N, second_N = np.array([0, 1, 2, 2, 1, 0]), np.array([1, 1, 0, 2, 2, 0])
    one_hot = np.eye(3, dtype=np.float32)
    settings = {"model": LINEAR[name], "label_smoothing": smoothing}
    of_class = [step(name, replace(batch, labels_N=labels_N), spec, **settings) for labels_N in (first_N, second_N)]
    mixed_NK = 0.75 * one_hot[first_N] + 0.25 * one_hot[second_N]
    # Padding has no class at all.
    mixed_NK[5] = 0
    mixed = step(name, replace(batch, labels_N=mixed_NK), spec, **settings)
    assert mixed.loss == pytest.approx(0.75 * of_class[0].loss + 0.25 * of_class[1].loss, rel=1e-5)
    assert mixed.num_correct == of_class[0].num_correct
    if weights:
        weighed = ModelSpec(SHAPE, THREE, spec.scale, weights)
        found = step(name, replace(batch, labels_N=mixed_NK), weighed, **settings)
        weights_N = batch.weights_N * (mixed_NK @ np.float32(weights))
        expected = step(name, replace(batch, labels_N=mixed_NK, weights_N=weights_N), spec, **settings)
        assert found.loss == pytest.approx(expected.loss, rel=1e-5)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_is_measured_with_such_labels(name):
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3), mixes_labels=True)
    batch = synthetic_batch(spec, 6)
    assert (batch.labels_N.shape, batch.labels_N.dtype) == ((6, 3), np.float32)
    assert np.isfinite(step(name, batch, spec, model=LINEAR[name]).loss)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_learns_from_mixed_rows(name, tiny_uri, tmp_path):
    settings = {"model": LINEAR[name], "epochs": 8, "learning_rate": 3e-3, "global_batch_size": 24, "num_streams": 4}
    result = train_here(tiny_uri, tmp_path, backend=name, augment=MIXES, **settings)
    assert result.evaluation.accuracy > 0.9


@pytest.mark.starts("ranks")
def test_mixed_steps_are_the_same_on_two_ranks(tiny_uri, tmp_path):
    settings = {"model": LINEAR["torch"], "epochs": 1, "augment": MIXES, "num_streams": 4, "global_batch_size": 24}
    recorder = Recorder()
    one = train_here(tiny_uri, tmp_path / "one", recorder, **settings)
    task = task_of(tiny_uri, tmp_path / "two", **settings, strategy="torch_ddp", launcher="local", num_workers=2)
    two = launch_forked(task, RunLog(SilentObserver()))
    assert two.history[-1].train_loss == pytest.approx(one.history[-1].train_loss, rel=1e-5)


def test_what_cannot_be_mixed_is_refused(tiny_uri):
    config = TrainConfig(augment=MIXES)
    with pytest.raises(UsageError, match=r"mixup_alpha = 0.4 and cutmix_alpha = 1, but .* kind 'float'; .* to 0"):
        check_labels(config, LabelSpec("float"))
    check_labels(config, LabelSpec("multi_label", ("a", "b")))
    dataset = open_dataset(tiny_uri)
    with pytest.raises(UsageError, match="a step has 1 row of each stream; .* lower num_streams"):
        check_trainable(TrainConfig(augment=MIXES, global_batch_size=8, num_streams=8, num_workers=1), dataset)
    with pytest.raises(UsageError, match="'petastorm' with mixup or cutmix"):
        check_trainable(TrainConfig(augment=MIXES, reader="petastorm", num_workers=1, num_streams=8), dataset)


def test_a_models_own_loss_takes_shares_or_is_refused():
    spec = ModelSpec(SHAPE, THREE, InputScale((120.0,) * 3, (60.0,) * 3))
    batch = replace(batch_of(SHAPE, 6), labels_N=np.full((6, 3), 1 / 3, np.float32))
    assert np.isfinite(step("keras", batch, spec, model=SOFTMAX["keras"]).loss)
    for model in ("compiled_by_name", "compiled_with_function"):
        with pytest.raises(UsageError, match=r"own loss \w+ takes class numbers; .* train.loss = \"softmax\""):
            step("keras", batch, spec, model=f"{MODELS}:{model}")


def test_the_shares_of_a_silo_are_those_of_the_pinned_classes():
    batch = replace(batch_of(SHAPE, 2), labels_N=np.float32([[0.25, 0.75], [1, 0]]))
    batches = SiloBatches(None, 0, 1, np.array([2, 0]), 3)
    assert batches._labels(batch).tolist() == [[0.75, 0, 0.25], [0, 0, 1]]


@pytest.mark.drill
def test_workers_of_a_parameter_server_send_shares_of_one_size(tiny_uri, tmp_path):
    augment = {**MIXES, "size": 12, "random_resized_crop": True, "min_crop_area": 0.5}
    result = launch_served(tiny_uri, tmp_path, Watcher(), model="small_cnn", epochs=2, augment=augment)
    assert result.history[1].train_loss < result.history[0].train_loss
    assert result.evaluation.accuracy > 0.9
