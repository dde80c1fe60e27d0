"""Local updates between averages of the weights: one update is a synchronous step, several still learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.lab.scale import exhaustive
from tests.train.learners import LINEAR, SHAPE, batch_of, learner, state
from tests.train.ranks import SMOOTH_MODEL, train_on_ranks
from tests.train.training import Recorder, check_terms, train_here
from train.backends import BACKENDS
from train.checkpoints.state import OPTIMIZER, WEIGHTS, load_arrays
from train.config import TrainConfig
from train.strategies.local_sgd import local_round
from train.strategies.options import LocalSgdOptions

# 96 samples in three streams of 32: at two ranks one has twice as many samples as the other, and a step has padding.
CONFIG = {"num_streams": 3, "global_batch_size": 30, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.05,
          "label_smoothing": 0.1}  # fmt: skip


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(("backend", "world_size"), [exhaustive("keras", 2), ("torch", 3)])
def test_one_local_update_is_a_synchronous_step(tiny_uri, tmp_path, backend, world_size):
    """With the momentum of SGD, of which the mean over ranks is that of the mean gradient, and in parts."""
    # Averages that move little would hold the losses back if they took the weights' place.
    config, one = {**CONFIG, "model": SMOOTH_MODEL[backend], "ema_decay": 0.9}, Recorder()
    alone = train_here(tiny_uri, tmp_path / "alone", one, **config)
    several = {**config, "strategy": "local_sgd", "accumulation_steps": 2}
    result, watched = train_on_ranks(tiny_uri, tmp_path / "several", world_size, several)
    assert watched.losses.keys() == one.losses.keys()
    for step, loss_hex in one.losses.items():
        assert float.fromhex(watched.losses[step]) == pytest.approx(float.fromhex(loss_hex), rel=1e-5)
    expected, found = (
        load_arrays((tmp_path / name / each.checkpoint / WEIGHTS).read_bytes())
        for name, each in (("alone", alone), ("several", result))
    )
    for of_one, of_several in zip(expected, found, strict=True):
        assert abs(of_one - of_several).max() <= 1e-5 * abs(of_one).max()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_local_part_that_is_all_padding_changes_nothing(name, optimizer):
    """Six rows in three parts, the second and third of which are padding: one update, by the first part."""
    whole = batch_of(SHAPE, num_rows=6)
    padded = replace(whole, weights_N=np.array([1, 1, 0, 0, 0, 0], np.float32))
    columns = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
    first_part = replace(whole, **{column: getattr(whole, column)[:2] for column in columns})
    found = []
    for batch, num_steps in ((padded, 3), (first_part, 1), (replace(whole, weights_N=np.zeros(6, np.float32)), 3)):
        one = learner(name, LINEAR[name], optimizer=optimizer)
        # Momentum and moments that a step without a gradient would go on with.
        one.apply(one.gradients(whole, 6, 1.0), 0.1)
        before = state(one)
        found.append((local_round(one, batch, num_steps, 0.1), state(one)))
    assert found[0] == found[1]
    assert found[0][0].num_samples == 2 and found[0][1] != before
    nothing, after = found[2]
    assert (nothing.num_samples, nothing.is_applied, after) == (0, True, before)


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_the_count_of_updates_if_padding_takes_some_from_one(tiny_uri, tmp_path, backend):
    """Of the 6 samples of an epoch's last round, in parts of 4 and 2 rows, rank 0 makes 2 updates and rank 1 one: all
    rounds before have 5. The mean over samples is 5/3."""
    config = {
        **CONFIG,
        "model": SMOOTH_MODEL[backend],
        "optimizer": "adam",
        "local_sgd": {"local_steps": 5},
        "epochs": 1,
    }
    result, _ = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "local_sgd"})
    arrays = load_arrays((tmp_path / result.last_checkpoint / OPTIMIZER).read_bytes())
    [count] = {float(array) for array in arrays if array.ndim == 0 and array > 1}
    assert count == (17 if backend == "keras" else pytest.approx(15 + 5 / 3))


@pytest.mark.starts("ranks")
def test_several_local_updates_learn_too(tiny_uri, tmp_path):
    config = {**CONFIG, "model": SMOOTH_MODEL["torch"], "local_sgd": {"local_steps": 5}, "epochs": 8}
    result, _ = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "local_sgd"})
    assert result.evaluation.accuracy >= 0.9
    assert result.strategy == "local_sgd"


def test_settings_that_local_updates_cannot_follow_are_refused():
    with pytest.raises(UsageError, match=r"local_sgd.local_steps = 2 with train.strategy = 'horovod'; which does not"):
        check_terms(TrainConfig(strategy="horovod").with_options(LocalSgdOptions(local_steps=2)), SparkConfig())
    with pytest.raises(UsageError, match=r"'float16' with train.strategy = 'local_sgd'"):
        check_terms(TrainConfig(strategy="local_sgd", mixed_precision="float16"), SparkConfig())
    many = TrainConfig(strategy="local_sgd", num_workers=2, accumulation_steps=4)
    with pytest.raises(UsageError, match=r"_steps = 4 times train.local_sgd.local_steps = 9; expected at most 32"):
        check_terms(many.with_options(LocalSgdOptions(local_steps=9)), SparkConfig())
    chosen = check_terms(TrainConfig(strategy="local_sgd").with_options(LocalSgdOptions(local_steps=4)), SparkConfig())
    assert chosen.config.backend == "keras"
