"""The strategy `mirrored` on several devices of one process; a machine without GPUs has logical CPU devices."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

from typing import Any

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.ranks import LONG, SMOOTH_MODEL, STATEFUL, kill_on_ranks, train_on_ranks
from tests.train.training import MODELS, check_terms, train_here
from train.config import TrainConfig
from train.strategies.mirrored import check_rows
from train.strategies.options import MirroredOptions

MIRRORED = {"strategy": "mirrored", "model": SMOOTH_MODEL["keras"]}


@pytest.mark.drill
def test_devices_with_state_of_their_own_resume_exactly(tiny_uri, tmp_path):
    """Each device has its moving statistics and draws its own dropout: all of that is in the checkpoint."""
    config = {**STATEFUL, "model": f"{MODELS}:stateful", "strategy": "mirrored", "mirrored": {"num_devices": 2}}
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", 1, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 1, config, killed_at=7)
    result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", 1, config)
    assert (result.resumed_from.epoch, result.resumed_from.step) == (1, 2)
    assert killed.losses | resumed.losses == undisturbed.losses
    assert (result.weights_sha256, result.evaluation) == (fresh.weights_sha256, fresh.evaluation)
    files = {file.name for file in (tmp_path / "killed" / result.checkpoint).iterdir()}
    assert {"rank-00000.npz", "rank-00001.npz"} < files


def test_devices_that_are_not_there_are_refused(tiny_uri, tmp_path):
    small: dict[str, Any] = {"strategy": "mirrored", "global_batch_size": 8}
    with pytest.raises(UsageError, match=r"mirrored.num_devices = 9 with train.global_batch_size = 8; .* = 8 or less"):
        check_terms(TrainConfig(**small).with_options(MirroredOptions(num_devices=9)), SparkConfig())
    with pytest.raises(
        UsageError, match=r"the 8 devices of train.mirrored.num_devices = 0 with .* in 2 microbatches; .* set .* = 4 or"
    ):
        check_rows(TrainConfig(**small, accumulation_steps=2), 8)
    # TensorFlow runs in this process, and has the devices that it was started with.
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 1
    with pytest.raises(UsageError, match=r"num_devices = 3; .* 1 CPU device.* set train.launcher = 'local'"):
        train_here(tiny_uri, tmp_path, **{**LONG, **MIRRORED}, mirrored={"num_devices": 3})
