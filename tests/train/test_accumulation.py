"""A step computed in parts: the same sums, in the memory of one part."""

# pyright: reportArgumentType=false
from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.learners import LINEAR, SHAPE, STATEFUL, TORCH_MODELS, batch_of, learner
from tests.train.training import MODELS
from train.backends import BACKENDS
from train.backends.backend import StatePart
from train.backends.microbatches import microbatches_of
from train.config import TrainConfig
from train.planning.make import plan_training

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


def test_more_parts_than_a_rank_has_samples_are_refused():
    given = {"global_batch_size": 64, "num_streams": 8, "num_workers": 3}
    plan_training(TrainConfig(accumulation_steps=16, **given), SparkConfig())
    with pytest.raises(UsageError, match=r"accumulation_steps = 17; expected at most 16, the samples of a step"):
        plan_training(TrainConfig(accumulation_steps=17, **given), SparkConfig())
