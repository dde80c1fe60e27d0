"""Optimizers, learning rates, averages and parts of a step: each number is the one of its formula."""

# pyright: reportArgumentType=false
from __future__ import annotations

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.learners import LINEAR, SHAPE, STATEFUL, THREE, TORCH_MODELS, batch_of, learner, step_of
from tests.train.training import MODELS, Killed, Recorder, check_terms, task_of, train_here
from train.api import Learner, StatePart
from train.backends import BACKENDS
from train.backends.keras.build import DTYPE_POLICIES, build_model
from train.backends.keras.optimizers import build_optimizer
from train.backends.keras.step import TrainStep
from train.backends.model_spec import InputScale
from train.backends.rules import is_decayed, microbatches_of
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, load_arrays
from train.config import TrainConfig
from train.identity import settings_that_matter
from train.optimizers import OPTIMIZERS
from train.published.export import export_training
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


def in_model(one: Learner) -> list[np.ndarray]:
    """What the model itself has, whatever the state calls weights."""
    return [array.copy() for array in one.named_weights().arrays().values()]


def shares(num_updates: int, limit: float) -> list[float]:
    return [1 - min(limit, (1 + each) / (10 + each)) for each in range(num_updates)]


@pytest.mark.parametrize("name", BACKENDS)
def test_averages_follow_the_weights_which_train_as_without_them(name):
    settings, limit, batch = {"optimizer": "adam"}, 0.25, batch_of(SHAPE, num_rows=6)
    plain = learner(name, STATEFUL[name], **settings)
    weights = plain.arrays(StatePart.WEIGHTS)
    expected = [array.astype(np.float64) for array in weights]
    # The bound counts from the fourth update on.
    for share in shares(5, limit):
        assert plain.apply(plain.gradients(batch, 6, 1.0), 0.1).is_applied
        weights = plain.arrays(StatePart.WEIGHTS)
        expected = [old + share * (now - old) for old, now in zip(expected, weights, strict=True)]
    # Behind it, because PyTorch's dropout draws from one generator.
    one = learner(name, STATEFUL[name], **settings, ema_decay=limit)
    for _ in range(5):
        one.apply(one.gradients(batch, 6, 1.0), 0.1)
    averages = one.arrays(StatePart.WEIGHTS)
    for average, right, weight in zip(averages, expected, weights, strict=True):
        np.testing.assert_allclose(average, right, rtol=1e-4, atol=1e-6)
        assert not np.allclose(average, weight, rtol=1e-3)
    assert all(map(np.array_equal, in_model(one), in_model(plain)))
    # The optimizer's part has them: how many updates, and the weights.
    assert all(map(np.array_equal, one.arrays(StatePart.OPTIMIZER)[-len(weights) :], weights))

    outputs_NK = one.outputs(batch.images_NHWC)
    with one.averaged():
        averaged_NK, sha256 = one.outputs(batch.images_NHWC), one.weights_sha256()
        assert not np.allclose(outputs_NK, averaged_NK)
    assert np.array_equal(one.outputs(batch.images_NHWC), outputs_NK)
    exported = learner(name, STATEFUL[name], seed=1)
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        exported.assign(part, one.arrays(part), "the test")
    assert exported.weights_sha256() == sha256
    assert np.array_equal(exported.outputs(batch.images_NHWC), averaged_NK)


@pytest.mark.parametrize("name", BACKENDS)
def test_averages_leave_out_what_was_not_applied_and_begin_with_given_weights(name):
    one = learner(name, STATEFUL[name], ema_decay=0.9)
    named = one.named_weights()
    given = {key: np.full_like(array, 0.5) for key, array in named.arrays().items()}
    named.assign(given)
    assert all((array == 0.5).all() for array in one.arrays(StatePart.WEIGHTS))

    batch = batch_of(SHAPE)
    one.apply(one.gradients(batch, 4, 1.0), 0.1)
    before = [array.tobytes() for part in StatePart for array in one.arrays(part)]
    *gradients, metrics = one.gradients(batch, 4, 1.0)
    own = one.arrays(StatePart.OWN)
    assert not one.apply([*gradients, metrics * float("nan")], 0.1).is_applied
    after = {part: one.arrays(part) for part in StatePart} | {StatePart.OWN: own}
    changed = [array.tobytes() for array in (*after[StatePart.WEIGHTS], *after[StatePart.OPTIMIZER])]
    assert changed == before[: len(changed)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_killed_training_continues_with_its_averages_and_exports_them(name, tiny_uri, tmp_path):
    how = {"model": LINEAR[name], "checkpoint_every_steps": 1, "checkpoint": {"keep": 9}, "ema_decay": 0.9,
           "export": "last"}  # fmt: skip
    whole, killed, resumed = Recorder(), Recorder(killed_at=3), Recorder()
    result = train_here(tiny_uri, tmp_path / "whole", whole, **how)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "parts", killed, **how)
    again = train_here(tiny_uri, tmp_path / "parts", resumed, **how)
    assert again.resumed_from is not None and killed.losses | resumed.losses == whole.losses
    assert (again.weights_sha256, again.evaluation) == (result.weights_sha256, result.evaluation)
    assert [each.validation for each in again.history] == [each.validation for each in result.history]

    # Against the weights of every step, as the checkpoints have them.
    *folders, _ = sorted((tmp_path / "whole" / "t" / "checkpoints").iterdir())
    assert len(folders) >= 3
    kept = [
        (load_arrays((folder / WEIGHTS).read_bytes()), load_arrays((folder / OPTIMIZER).read_bytes()))
        for folder in folders
    ]
    for number, ((before, _), (after, optimizer)) in enumerate(pairwise(kept), start=1):
        weights = optimizer[-len(after) :]
        share = shares(number + 1, 0.9)[-1]
        for old, average, weight in zip(before, after, weights, strict=True):
            np.testing.assert_allclose(average, old + share * (weight - old), rtol=1e-4, atol=1e-6)

    # Without them the same losses, and other metrics.
    plain = train_here(tiny_uri, tmp_path / "plain", bare := Recorder(), **{**how, "ema_decay": 0.0})
    assert bare.losses == whole.losses and plain.weights_sha256 != result.weights_sha256
    config = task_of(tiny_uri, tmp_path, **how).config
    outcome = export_training(str(tmp_path / "whole"), config, result, "run")
    # Loaded back it has the metrics that were recorded, or it would not be there.
    assert outcome.export.record.weights_sha256 == result.weights_sha256


def test_averages_are_another_training_and_none_are_the_same():
    assert "ema_decay" not in settings_that_matter(TrainConfig())
    assert settings_that_matter(TrainConfig(ema_decay=0.9))["ema_decay"] == "0.9"


ROOT = Path(__file__).parents[2]
WIDE = {"keras": f"{MODELS}:wide", "torch": f"{TORCH_MODELS}:wide"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_computed_in_parts_gives_the_same_sums(name):
    """Five rows in four parts: none of the parts is of the size of all others."""
    batch = batch_of(SHAPE, num_rows=5)
    whole = learner(name, LINEAR[name]).gradients(batch, 5, 1.0)
    accumulated = learner(name, LINEAR[name], accumulation_steps=4).gradients(batch, 5, 1.0)
    for expected, found in zip(whole, accumulated, strict=True):
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_update_by_parts_is_that_of_the_whole_batch(name):
    """Clipped by the norm of the whole gradient; with padding, of which the last part has nothing else. What the
    optimizer remembers is the same, too, as a second step shows."""
    batch = replace(batch_of(SHAPE, num_rows=6), weights_N=np.array([1, 1, 1, 1, 0, 0], np.float32))
    found = []
    for parts in (1, 3):
        one = learner(name, LINEAR[name], accumulation_steps=parts, optimizer="sgd", gradient_clip_norm=0.1)
        outcomes = [one.apply(one.gradients(batch, 4, 1.0), 0.05) for _ in range(2)]
        found.append(
            (outcomes, [each for part in (StatePart.WEIGHTS, StatePart.OPTIMIZER) for each in one.arrays(part)])
        )
    (whole, expected), (accumulated, arrays) = found
    assert min(outcome.gradient_norm for outcome in whole) > 0.1, "clipped"
    for one, other in zip(whole, accumulated, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-5) and other.num_correct == one.num_correct
        assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    for one, other in zip(expected, arrays, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_adds_nothing_to_the_sums_of_the_parts(name):
    padded = replace(batch_of(SHAPE, num_rows=6), weights_N=np.array([1, 1, 1, 1, 0, 0], np.float32))
    columns = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
    without = replace(padded, **{column: getattr(padded, column)[:4] for column in columns})
    for parts in (2, 6):
        one = learner(name, LINEAR[name], accumulation_steps=parts)
        for expected, found in zip(one.gradients(without, 4, 1.0), one.gradients(padded, 4, 1.0), strict=True):
            np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_each_part_moves_statistics_and_generators_as_a_batch_of_its_own(name):
    """Batch norm and dropout: parts one after the other, and their sums. A regularisation loss counts once."""
    batch = batch_of(SHAPE, num_rows=6)
    accumulated = learner(name, STATEFUL[name], accumulation_steps=3)
    found, state = accumulated.gradients(batch, 6, 1.0), accumulated.arrays(StatePart.OWN)
    # PyTorch has one generator: it begins anew here.
    by_hand = learner(name, STATEFUL[name])
    addends = [by_hand.gradients(part, 6, 1 / 3) for part in microbatches_of(batch, 3)]
    for place, total in enumerate(found):
        expected = sum(np.array(each[place]) for each in addends)
        np.testing.assert_allclose(np.array(total), expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(state, by_hand.arrays(StatePart.OWN), strict=True):
        np.testing.assert_array_equal(one, other)
    fresh = learner(name, STATEFUL[name]).arrays(StatePart.OWN)
    assert any((one != other).any() for one, other in zip(state, fresh, strict=True))


@pytest.mark.starts("program")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_in_parts_needs_the_memory_of_one_part(name):
    """48 images, whose activations are those of a convolution with 128 x 128 x 32 outputs: one by one, then at once."""
    command = [sys.executable, "-m", "tests.programs.memory_of_a_step", name, WIDE[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    in_parts_MiB, at_once_MiB = (int(line) for line in done.stdout.split()[-2:])
    # The convolution's outputs alone are 96 MiB.
    assert at_once_MiB - in_parts_MiB > 75, done.stdout + done.stderr[-1000:]
