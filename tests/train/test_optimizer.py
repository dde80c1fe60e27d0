"""Optimizers, learning rates and precision: every entry works, and each number is the one of its formula."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tests.train.test_models import SHAPE, THREE, batch_of, step_of
from tests.train.training import Killed, Recorder, train_here
from train.backends.backend import InputScale
from train.backends.keras.build import DTYPE_POLICIES, build_model
from train.backends.keras.optimizers import build_optimizer
from train.backends.keras.step import TrainStep
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS
from train.schedules import SCHEDULES


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_resumes(tiny_uri, tmp_path, name):
    config = {"optimizer": name, "learning_rate": 0.005, "epochs": 3}
    result = train_here(tiny_uri, tmp_path / "whole", **config)
    assert result.history[-1].train_loss < result.history[0].train_loss

    recorder = Recorder(killed_at=5)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", recorder, checkpoint_every_steps=2, **config)
    assert train_here(tiny_uri, tmp_path / "killed", **config).weights_sha256 == result.weights_sha256


def test_momentum_and_weight_decay_reach_the_optimizer():
    for config in (TrainConfig(optimizer="sgd", momentum=0.5), TrainConfig(optimizer="adamw", weight_decay=0.25)):
        optimizer = OPTIMIZERS[config.optimizer].keras(config)
        assert (optimizer.momentum if config.optimizer == "sgd" else optimizer.weight_decay) in (0.5, 0.25)


def test_clipping_bounds_the_update():
    config = TrainConfig(optimizer="sgd", momentum=0, gradient_clip_norm=0.01)
    built, step = step_of(config, SHAPE)
    before = [np.array(variable) for variable in built.model.trainable_variables]
    outcome = step.apply(step.gradients(batch_of(SHAPE), 4, 1.0), 1.0)
    assert outcome.gradient_norm > 0.01, "reported as it was before clipping"
    changes = [np.array(v) - old for v, old in zip(built.model.trainable_variables, before, strict=True)]
    assert math.sqrt(sum(float((change**2).sum()) for change in changes)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("mixed_precision", DTYPE_POLICIES)
def test_every_precision_trains_with_float32_weights(tiny_uri, tmp_path, mixed_precision):
    import keras

    result = train_here(tiny_uri, tmp_path, mixed_precision=mixed_precision, epochs=3, learning_rate=0.005)
    assert result.history[-1].train_loss < result.history[0].train_loss
    assert keras.config.dtype_policy().name == "float32", "nothing built later inherits it"
    built, _ = step_of(TrainConfig(mixed_precision=mixed_precision), SHAPE)
    assert {str(variable.dtype) for variable in built.model.variables} == {"float32"}
    assert built.model.layers[1].compute_dtype == {"off": "float32"}.get(mixed_precision, mixed_precision)


def test_float16_skips_a_step_that_overflows_and_goes_on():
    config = TrainConfig(mixed_precision="float16", optimizer="sgd")
    built = build_model(config, SHAPE, THREE)
    chosen = build_optimizer(config, built.model, built.compiled_optimizer)
    step, optimizer = TrainStep(built, chosen, InputScale((120.0,) * 3, (60.0,) * 3)), chosen.optimizer
    optimizer.dynamic_scale.assign(1e30)
    before = np.array(built.model.trainable_variables[0])
    outcome = step.apply(step.gradients(batch_of(SHAPE), 4, 1.0), 0.1)
    assert outcome.is_applied and outcome.overflowed
    np.testing.assert_array_equal(before, np.array(built.model.trainable_variables[0]))
    assert float(optimizer.dynamic_scale.value) == pytest.approx(5e29)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_starts_at_the_base_after_the_warm_up(schedule):
    config = TrainConfig(schedule=schedule, learning_rate=0.5, epochs=40, warmup_steps=10)
    rates = [config.learning_rate_at(step, steps_per_epoch=5) for step in range(200)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(0.5)
    assert all(0 < later <= earlier for earlier, later in itertools.pairwise(rates[9:]))


def test_schedules_follow_their_formulas():
    cosine = TrainConfig(schedule="cosine", learning_rate=1.0, epochs=10)
    assert cosine.learning_rate_at(25, steps_per_epoch=5) == pytest.approx(0.5)
    assert cosine.learning_rate_at(49, steps_per_epoch=5) == pytest.approx(0.5 * (1 + math.cos(math.pi * 49 / 50)))
    by_step = TrainConfig(
        schedule="step", learning_rate=1.0, schedule_step_epochs=2, schedule_step_factor=0.5, epochs=9
    )
    assert [by_step.learning_rate_at(5 * epoch, 5) for epoch in range(5)] == pytest.approx([1, 1, 0.5, 0.5, 0.25])
    assert TrainConfig(schedule="constant", learning_rate=0.25).learning_rate_at(3, 5) == 0.25


def test_linear_scaling_follows_the_global_batch():
    scaled = TrainConfig(learning_rate=0.1, learning_rate_batch_size=256, global_batch_size=1024, schedule="constant")
    assert scaled.learning_rate_at(0, 5) == pytest.approx(0.4)
    assert TrainConfig(learning_rate=0.1, global_batch_size=1024, schedule="constant").learning_rate_at(0, 5) == 0.1


def test_a_warm_up_longer_than_the_training_never_ends():
    config = TrainConfig(learning_rate=1.0, epochs=1, warmup_steps=100)
    assert [config.learning_rate_at(step, 5) for step in range(5)] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
