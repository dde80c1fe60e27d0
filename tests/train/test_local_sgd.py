"""Local updates between averages of the weights: one update is a synchronous step, several still learn."""

from __future__ import annotations

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.test_multi_rank import SMOOTH_MODEL, train_on_ranks
from tests.train.training import Recorder, train_here
from train.backends import BACKENDS
from train.checkpoints.state import WEIGHTS, load_arrays
from train.checks.preflight import check_terms
from train.config import TrainConfig

# 96 samples in three streams of 32: at two ranks one has twice as many samples as the other, and a step has padding.
CONFIG = {"num_streams": 3, "global_batch_size": 30, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.05,
          "label_smoothing": 0.1}  # fmt: skip


@pytest.mark.parametrize(("backend", "world_size"), zip(BACKENDS, (2, 3), strict=True))
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


def test_several_local_updates_learn_too(tiny_uri, tmp_path):
    config = {**CONFIG, "model": SMOOTH_MODEL["torch"], "local_steps": 5, "epochs": 8}
    result, _ = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "local_sgd"})
    assert result.evaluation.accuracy >= 0.9
    assert result.strategy == "local_sgd"


def test_settings_that_local_updates_cannot_follow_are_refused():
    with pytest.raises(UsageError, match=r"local_steps = 2 with train.strategy = 'horovod'; all its ranks"):
        check_terms(TrainConfig(strategy="horovod", local_steps=2), SparkConfig())
    with pytest.raises(UsageError, match=r"'float16' with train.strategy = 'local_sgd'"):
        check_terms(TrainConfig(strategy="local_sgd", mixed_precision="float16"), SparkConfig())
    with pytest.raises(ValueError, match=r"accumulation_steps = 4 times train.local_steps = 9 to be at most 32"):
        TrainConfig(strategy="local_sgd", num_workers=2, accumulation_steps=4, local_steps=9)
    chosen = check_terms(TrainConfig(strategy="local_sgd", local_steps=4), SparkConfig())
    assert chosen.config.backend == "keras"
