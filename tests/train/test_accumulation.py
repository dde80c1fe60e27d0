"""A step computed in parts: the same sums, in the memory of one part."""

# pyright: reportArgumentType=false
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.train.test_backends import LINEAR, SHAPE, TORCH_MODELS, learner
from tests.train.test_models import batch_of
from tests.train.training import MODELS
from train.backends import BACKENDS
from train.config import TrainConfig

ROOT = Path(__file__).parents[2]
WIDE = {"keras": f"{MODELS}:wide", "torch": f"{TORCH_MODELS}:wide"}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_computed_in_parts_gives_the_same_sums(name):
    """Five rows in four parts: none of the parts is of the size of all others."""
    batch = batch_of(SHAPE, num_rows=5)
    whole = learner(name, LINEAR[name]).gradients(batch, 5, 1.0)
    in_parts = learner(name, LINEAR[name], accumulation_steps=4).gradients(batch, 5, 1.0)
    for expected, found in zip(whole, in_parts, strict=True):
        np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_in_parts_needs_the_memory_of_one_part(name):
    """96 images, whose activations are those of a convolution with 128 x 128 x 32 outputs: one by one, then at once."""
    command = [sys.executable, "-m", "tests.programs.memory_of_a_step", name, WIDE[name]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    in_parts_MiB, at_once_MiB = (int(line) for line in done.stdout.split()[-2:])
    # The convolution's outputs alone are 192 MiB.
    assert at_once_MiB - in_parts_MiB > 150, done.stdout + done.stderr[-1000:]


def test_more_parts_than_a_rank_has_samples_are_refused():
    given = {"global_batch_size": 64, "num_streams": 8, "num_workers": 3}
    assert TrainConfig(accumulation_steps=16, **given).accumulation_steps == 16
    with pytest.raises(ValueError, match=r"accumulation_steps = 17 times .* to be at most 16, the samples of a"):
        TrainConfig(accumulation_steps=17, **given)
