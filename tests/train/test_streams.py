"""The number of streams, unless it is set: equal for up to 8 ranks, enough for any more, and kept by a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.epoch_plan import num_streams_for, streams_of_rank
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.test_recipe import Dying
from tests.train.test_trainings import Observer, tree_of
from tests.train.training import Killed
from train.choosing.auto import choose_ranks, resolve
from train.choosing.auto_rules import Facts
from train.config import TrainConfig
from train.training import finished_training, train_model
from train.tree import TrainTree


@pytest.mark.parametrize("global_batch_size", [1, 5, 24, 30, 64, 67, 100, 256, 1000])
def test_every_rank_has_a_stream_and_every_stream_equally_many_rows_of_a_batch(global_batch_size: int):
    for world_size in range(1, global_batch_size + 1):
        num_streams = num_streams_for(global_batch_size, world_size)
        assert global_batch_size % num_streams == 0
        assert all(len(streams_of_rank(rank, world_size, num_streams)) for rank in range(world_size))
        if world_size > 8 and global_batch_size % world_size == 0:
            assert num_streams == world_size, "equal shares, if the batch has them"
    up_to_8 = {num_streams_for(global_batch_size, world_size) for world_size in range(1, min(9, global_batch_size + 1))}
    assert len(up_to_8) == 1


@pytest.mark.parametrize(
    ("num_workers", "num_streams"), [(1, 8), (3, 8), (8, 8), (9, 16), (16, 16), (20, 32), (64, 64)]
)
def test_any_number_of_ranks_up_to_the_batch_is_accepted_by_default(num_workers: int, num_streams: int):
    assert TrainConfig(num_workers=num_workers).num_streams == num_streams
    with pytest.raises(ValueError, match="train.num_workers = 65 to be at most train.global_batch_size = 64"):
        TrainConfig(num_workers=65)
    with pytest.raises(ValueError, match="train.num_workers = 9 to be at most train.num_streams = 8"):
        TrainConfig(num_workers=9, num_streams=8)


@pytest.mark.parametrize(("num_gpus", "expected"), [(3, 2), (8, 8), (12, 8), (16, 16)])
def test_auto_uses_all_devices_that_get_equal_shares(num_gpus: int, expected: int):
    facts = Facts(
        num_workers=0, num_ranks=1, local_steps=1, backend="torch", is_keras_model=False, num_devices=num_gpus,
        spark_master="local[*]", installed=frozenset({"torch_ddp", "local"}), num_started=0, num_named=0, only_one="",
        num_gpus=num_gpus, may_use_cluster=False, num_places=None, why_no_places="", num_steps=10_000, num_rows=10**6,
    )  # fmt: skip
    assert choose_ranks(TrainConfig(), facts)[0] == expected
    # What is set, is kept.
    assert choose_ranks(TrainConfig(num_streams=8), facts)[0] == min(8, expected)


def unset(tree: TrainTree, **changes: object) -> TrainTree:
    """Without a number of streams."""
    given = tree.train.model_dump(exclude={"num_streams"}, exclude_unset=True) | changes
    return tree.model_copy(update={"train": TrainConfig(**given)})


def test_a_resume_keeps_the_streams_with_which_the_training_began(tiny_uri, tmp_path):
    set_to_12 = tree_of(tiny_uri, tmp_path / "models", num_streams=12, checkpoint_every_steps=3)
    expected = train_model(tree_of(tiny_uri, tmp_path / "whole", num_streams=12), Observer()).result
    with pytest.raises(Killed):
        train_model(set_to_12, Dying())

    # A batch of 24 has 8 streams for one rank; the checkpoint is of 12, as 9 ranks would have begun.
    tree = unset(set_to_12)
    assert resolve(tree.train, SparkConfig()).config.num_streams == 8
    too_many = unset(set_to_12, num_workers=13, launcher="local", strategy="horovod")
    with pytest.raises(UsageError, match="13 ranks for a training that was begun with train.num_streams = 12"):
        train_model(too_many, Observer())
    resumed = train_model(tree, Observer()).result
    assert resumed.weights_sha256 == expected.weights_sha256 and resumed.resumed_from is not None
    assert finished_training(tree).result == resumed
    # From the beginning, there are as many as for this number of ranks, and they are found from then on.
    anew = train_model(tree, Observer(), fresh_for="run-1").result
    assert anew.training_dir.split("/")[1] != resumed.training_dir.split("/")[1]
    assert train_model(tree, Observer()).result == replace(anew)
