"""The number of streams, unless it is set: equal for up to 8 ranks, enough for any more, and kept by a resume."""

from __future__ import annotations

import tomllib

import pytest

from pipeline.config_file import to_toml
from shardmill.epoch_plan import num_streams_for, streams_of_rank
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.training import DriverRecorder, Killed, tree_of
from train.config import TrainConfig
from train.planning.auto import choose_ranks, resolve
from train.planning.auto_rules import Facts
from train.planning.changes import Again
from train.training import finished_training, train_model
from train.tree import TrainTree


class Dying(DriverRecorder):
    """Ends the training at its sixth step, as a crash would."""

    def step(self, step) -> None:
        super().step(step)
        if len(self.steps) == 6:
            raise Killed


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
    config = TrainConfig(num_workers=num_workers)
    assert config.num_streams == 0 and resolve(config, SparkConfig()).config.num_streams == num_streams
    for given, said in (
        ({"num_workers": 65}, "65 with train.global_batch_size = 64; .* set train.num_workers = 64 or less"),
        ({"num_workers": 9, "num_streams": 8}, "9 for train.num_streams = 8; .* set train.num_workers = 8 or less"),
    ):
        with pytest.raises(UsageError, match=f"train.num_workers = {said}"):
            resolve(TrainConfig(**given), SparkConfig())


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


def rejoined(tree: TrainTree) -> TrainTree:
    """As `runs/ID/config.toml` of a run gives it again."""
    return TrainTree.model_validate(tomllib.loads(to_toml(tree)))


def test_a_resume_keeps_the_streams_with_which_the_training_began(tiny_uri, tmp_path, monkeypatch):
    expected = train_model(tree_of(tiny_uri, tmp_path / "whole", num_streams=12), DriverRecorder()).result
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=0, checkpoint_every_steps=3)
    # As on a machine that has 9 GPUs: a batch of 24 then has 12 streams.
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    with pytest.raises(Killed):
        train_model(tree, Dying())
    monkeypatch.undo()

    assert resolve(tree.train, SparkConfig()).config.num_streams == 8
    ranks = {"num_workers": 13, "launcher": "local", "strategy": "horovod"}
    too_many = tree.model_copy(update={"train": tree.train.model_copy(update=ranks)})
    with pytest.raises(UsageError, match="13 ranks for a training that began with train.num_streams = 12"):
        train_model(too_many, DriverRecorder())
    weights = tree.train.model_copy(update={"rank_weights": (1.0,) * 13, "num_workers": 0})
    with pytest.raises(UsageError, match="13 ranks .* or train.num_streams = 24"):
        train_model(tree.model_copy(update={"train": weights}), DriverRecorder())
    resumed = train_model(rejoined(tree), DriverRecorder()).result
    assert resumed.weights_sha256 == expected.weights_sha256 and resumed.resumed_from is not None
    # However many ranks there are where it is exported from.
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    assert finished_training(tree).result == resumed == finished_training(rejoined(tree)).result
    monkeypatch.undo()

    # From the beginning there are as many as for this number of ranks, and that training counts from then on.
    anew = train_model(tree, DriverRecorder(), fresh_for="run-1").result
    assert anew.weights_sha256 != resumed.weights_sha256 and finished_training(tree).result == anew
    # What is set by hand is another training, and is not taken for this one.
    by_hand = tree.model_copy(update={"train": tree.train.model_copy(update={"num_streams": 12})})
    assert train_model(by_hand, DriverRecorder()).skipped is False
    assert train_model(tree, DriverRecorder()).result == anew


def test_changed_settings_resume_with_the_streams_that_the_training_had(tiny_uri, tmp_path, monkeypatch):
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=0, checkpoint_every_steps=3)
    monkeypatch.setattr("train.config.num_streams_for", lambda batch, ranks: num_streams_for(batch, max(9, ranks)))
    with pytest.raises(Killed):
        train_model(tree, Dying())
    monkeypatch.undo()
    changed = tree.model_copy(update={"train": tree.train.model_copy(update={"learning_rate": 0.01})})
    observer = DriverRecorder()
    resumed = train_model(changed, observer, again=Again(allow_change=("learning_rate",))).result
    assert resumed.resumed_from is not None
    [told] = observer.named("changed")
    assert "num_streams" not in told["changes"]
    # The reported windows are those of these streams.
    [plan] = observer.named("plan")
    assert plan["streams_per_rank"] == 12
