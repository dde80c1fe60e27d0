"""Optimizers, learning rates and precision: every entry works, and each number is the one of its formula."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.learners import LINEAR, SHAPE, THREE, batch_of, learner, step_of
from tests.train.training import MODELS, Killed, Recorder, check_terms, train_here
from train.backends import BACKENDS
from train.backends.backend import InputScale, StatePart
from train.backends.keras.build import DTYPE_POLICIES, build_model
from train.backends.keras.optimizers import build_optimizer
from train.backends.keras.step import TrainStep
from train.backends.weight_decay import is_decayed
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS
from train.schedules import SCHEDULES, StepOptions, learning_rate_at


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_resumes(tiny_uri, tmp_path, name):
    config = {"optimizer": name, "learning_rate": 0.005}
    result = train_here(tiny_uri, tmp_path / "whole", **config)
    assert result.history[-1].train_loss < result.history[0].train_loss

    recorder = Recorder(killed_at=3)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", recorder, checkpoint_every_steps=2, **config)
    assert train_here(tiny_uri, tmp_path / "killed", **config).weights_sha256 == result.weights_sha256


def both_arrays(learner) -> list[np.ndarray]:
    """Kernel and bias of a linear model; PyTorch's kernel, like its images, has channels first."""
    return [np.array(each, np.float64) for each in learner.arrays(StatePart.WEIGHTS)]


@pytest.mark.parametrize("name", BACKENDS)
def test_sgd_is_its_formula_under_a_changing_rate(name):
    """The sum of gradients times the rate of now, with L2 in it for the kernel: in NumPy beside each backend."""
    config = {"schedule": "step", "schedule_step": {"every_epochs": 1}, "learning_rate": 0.05, "warmup_steps": 2}
    config = {**config, "optimizer": "sgd", "momentum": 0.8, "weight_decay": 0.3}
    one, rates = learner(name, LINEAR[name], **config), TrainConfig(**config)
    expected, momenta = both_arrays(one), [0.0, 0.0]
    for step in range(9):
        batch, rate = batch_of(SHAPE, num_rows=3 + step), learning_rate_at(rates, step, steps_per_epoch=3)
        addends = one.gradients(batch, 3 + step, 1.0)
        for place, decay in enumerate((0.3, 0.0)):
            gradient = np.array(addends[place], np.float64) + decay * expected[place]
            momenta[place] = 0.8 * momenta[place] + gradient
            expected[place] = expected[place] - rate * momenta[place]
        one.apply(addends, rate)
        for found, wanted in zip(both_arrays(one), expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_adamw_shrinks_kernels_and_no_biases(name):
    batch, found = batch_of(SHAPE, num_rows=6), {}
    for decay in (0.0, 0.5):
        one = learner(name, LINEAR[name], optimizer="adamw", weight_decay=decay)
        one.assign(StatePart.WEIGHTS, [np.full_like(each, 0.25) for each in one.arrays(StatePart.WEIGHTS)], "the test")
        one.apply(one.gradients(batch, 6, 1.0), 0.01)
        found[decay] = both_arrays(one)
    (kernel, bias), (decayed, same_bias) = found[0.0], found[0.5]
    np.testing.assert_allclose(decayed, kernel - 0.01 * 0.5 * 0.25, rtol=1e-5)
    np.testing.assert_array_equal(same_bias, bias)


def test_what_weight_decay_leaves_alone():
    for name, num_axes in (
        ("dense/kernel", 2), ("layer1.0.conv1.weight", 4), ("attention.in_proj_weight", 2), ("embedding/embeddings", 2),
        ("mha/query/kernel", 3), ("compose.weight", 2),
    ):  # fmt: skip
        assert is_decayed(name, num_axes), name
    for name, num_axes, owner in (
        ("dense/bias", 1, ""), ("mha/query/bias", 2, ""), ("in_proj_bias", 1, ""), ("batch_norm/gamma", 1, ""),
        ("ln/gamma", 3, ""), ("norm.weight", 3, "LayerNorm"), ("norm.weight", 3, "LayerNorm2d"), ("scale", 1, ""),
        ("encoder.pos_embedding", 3, ""), ("pos_embed", 3, ""), ("positional_embedding", 2, ""), ("cls_token", 3, ""),
        ("class_token", 3, ""), ("position_embedding/embeddings", 2, ""), ("rnn.bias_ih_l0", 1, ""),
        ("attn.relative_position_bias_table", 2, ""), ("temperature", 0, ""),
    ):  # fmt: skip
        assert not is_decayed(name, num_axes, owner), name


@pytest.mark.parametrize("model", ["vit", "resnet50"])
def test_of_our_models_only_kernels_are_decayed(model):
    """Above all not the vision transformer's embedding of positions, which is a bias of a dense layer."""
    config = TrainConfig(model=model, optimizer="adamw")
    built = build_model(config, (32, 32, 3), THREE)
    optimizer = build_optimizer(config, built.model, None).optimizer
    weights = built.model.trainable_variables
    decayed = {weight.path for weight in weights if optimizer._use_weight_decay(weight)}
    assert decayed == {weight.path for weight in weights if weight.path.rpartition("/")[2] == "kernel"}
    assert optimizer.weight_decay == 0.05


def test_a_setting_that_nothing_chosen_uses_is_refused():
    for config, message in (
        ({"momentum": 0.9}, r"train.momentum = 0.9 with train.optimizer = 'auto'; which does not use it; .* to 'sgd'"),
        ({"optimizer": "adam", "momentum": 0}, "train.momentum = 0.0 with train.optimizer = 'adam'"),
        ({"optimizer": "adamw", "momentum": 0.5}, "train.momentum = 0.5 with train.optimizer = 'adamw'"),
        ({"optimizer": "adam", "weight_decay": 1e-4}, "train.weight_decay = 0.0001 .* to 'sgd' or 'adamw'"),
        (
            {"strategy": "torch_fsdp", "num_workers": 2, "model": "vit", "pipeline_parallel": {"schedule": "gpipe"}},
            r"train.pipeline_parallel.schedule = 'gpipe' with train.strategy = 'torch_fsdp'; which does not use",
        ),
        ({"schedule_step": {"factor": 0.5}}, "train.schedule_step.factor = 0.5 with train.schedule = 'cosine'"),
    ):
        with pytest.raises(UsageError, match=message):
            check_terms(TrainConfig(**config), SparkConfig())
    check_terms(TrainConfig(optimizer="sgd", momentum=0, weight_decay=0), SparkConfig())
    by_step = TrainConfig(optimizer="adamw", weight_decay=0.1, schedule="step")
    check_terms(by_step.with_options(StepOptions(every_epochs=2)), SparkConfig())


def test_what_the_optimizer_of_a_compiled_model_does_not_follow_is_refused():
    for name, value in (("learning_rate", 0.5), ("schedule", "constant"), ("warmup_steps", 3)):
        config = TrainConfig(model=f"{MODELS}:compiled_by_name", **{name: value})
        built = build_model(config, SHAPE, THREE)
        with pytest.raises(UsageError, match=f"train.{name} = .* with the optimizer of a compiled model"):
            build_optimizer(config, built.model, built.compiled_optimizer)


def test_clipping_bounds_the_update():
    config = TrainConfig(optimizer="sgd", momentum=0, weight_decay=0, gradient_clip_norm=0.01)
    built, step = step_of(config, SHAPE)
    before = [np.array(variable) for variable in built.model.trainable_variables]
    outcome = step.apply(step.gradients(batch_of(SHAPE), 4, 1.0), 1.0)
    assert outcome.gradient_norm > 0.01, "reported as it was before clipping"
    changes = [np.array(v) - old for v, old in zip(built.model.trainable_variables, before, strict=True)]
    assert math.sqrt(sum(float((change**2).sum()) for change in changes)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("mixed_precision", DTYPE_POLICIES)
def test_every_precision_trains_with_float32_weights(tiny_uri, tmp_path, mixed_precision):
    import keras

    result = train_here(tiny_uri, tmp_path, mixed_precision=mixed_precision, learning_rate=0.005)
    assert result.history[-1].train_loss < result.history[0].train_loss
    assert keras.config.dtype_policy().name == "float32", "nothing built later inherits it"
    built, _ = step_of(TrainConfig(mixed_precision=mixed_precision), SHAPE)
    assert {str(variable.dtype) for variable in built.model.variables} == {"float32"}
    assert built.model.layers[1].compute_dtype == {"off": "float32"}.get(mixed_precision, mixed_precision)


def test_float16_skips_a_step_that_overflows_and_continues():
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
    rates = [learning_rate_at(config, step, steps_per_epoch=5) for step in range(200)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[10] == pytest.approx(0.5)
    assert all(0 < later <= earlier for earlier, later in itertools.pairwise(rates[9:]))


def test_schedules_follow_their_formulas():
    cosine = TrainConfig(schedule="cosine", learning_rate=1.0, epochs=10)
    assert learning_rate_at(cosine, 25, steps_per_epoch=5) == pytest.approx(0.5)
    assert learning_rate_at(cosine, 49, steps_per_epoch=5) == pytest.approx(0.5 * (1 + math.cos(math.pi * 49 / 50)))
    by_step = TrainConfig(schedule="step", learning_rate=1.0, epochs=9)
    by_step = by_step.with_options(StepOptions(every_epochs=2, factor=0.5))
    assert [learning_rate_at(by_step, 5 * epoch, 5) for epoch in range(5)] == pytest.approx([1, 1, 0.5, 0.5, 0.25])
    at_epochs = by_step.with_options(StepOptions(at_epochs=(1, 4), factor=0.5))
    assert [learning_rate_at(at_epochs, 5 * epoch, 5) for epoch in range(5)] == pytest.approx([1, 0.5, 0.5, 0.5, 0.25])
    assert learning_rate_at(TrainConfig(schedule="constant", learning_rate=0.25), 3, 5) == 0.25
    for given, problem in (
        ({"at_epochs": (4, 1)}, "ascending order"),
        ({"at_epochs": (3, 3)}, "ascending order"),
        ({"at_epochs": (3,), "every_epochs": 2}, "not both"),
    ):
        with pytest.raises(ValueError, match=problem):
            StepOptions(**given)


def test_linear_scaling_follows_the_global_batch():
    scaled = TrainConfig(learning_rate=0.1, learning_rate_batch_size=256, global_batch_size=1024, schedule="constant")
    assert learning_rate_at(scaled, 0, 5) == pytest.approx(0.4)
    assert learning_rate_at(TrainConfig(learning_rate=0.1, global_batch_size=1024, schedule="constant"), 0, 5) == 0.1


def test_a_warm_up_longer_than_the_training_never_ends():
    config = TrainConfig(learning_rate=1.0, epochs=1, warmup_steps=100)
    assert [learning_rate_at(config, step, 5) for step in range(5)] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.05])
