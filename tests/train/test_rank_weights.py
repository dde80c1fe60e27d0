"""Slow ranks read fewer streams, and the training stays the one that it was."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from shardmill.epoch_plan import streams_by_weight
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.forked_ranks import launch_forked
from tests.train.training import Recorder, StepWatcher, check_terms, task_of, train_here
from train.config import TrainConfig
from train.planning.auto import resolve

CONFIG = {"model": "tests.train.torch_models:smooth", "num_streams": 8, "global_batch_size": 24, "epochs": 4,
          "label_smoothing": 0.1, "record_samples": True}  # fmt: skip


def test_every_stream_has_one_rank_and_shares_follow_the_weights():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        num_streams = chance.randint(1, 64)
        weights = [chance.uniform(0.01, 10) for _ in range(chance.randint(1, num_streams))]
        ranges = streams_by_weight(weights, num_streams)
        assert [stream for each in ranges for stream in each] == list(range(num_streams))
        assert all(ranges) and len(ranges) == len(weights)
        if min(weights) / sum(weights) * num_streams >= 1:
            shares = [weight / sum(weights) * num_streams for weight in weights]
            assert all(abs(len(each) - share) < 1 for each, share in zip(ranges, shares, strict=True))
    assert [len(each) for each in streams_by_weight([1, 1, 0.5], 10)] == [4, 4, 2]


@pytest.mark.starts("ranks")
def test_the_global_batches_and_losses_stay_the_same(tiny_uri, tmp_path):
    one, watcher = Recorder(), StepWatcher()
    train_here(tiny_uri, tmp_path / "one", one, **CONFIG)
    how = {"strategy": "torch_ddp", "launcher": "local", "num_workers": 2, "rank_weights": [3, 1]}
    task = task_of(tiny_uri, tmp_path / "two", **CONFIG, **how)
    launch_forked(task, watcher)
    assert watcher.sample_ids == {(report.epoch, report.step): report.sample_ids for report in one.steps}
    for step, loss in one.losses.items():
        assert float.fromhex(watcher.losses[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)
    # Of a full step the first rank reads three quarters.
    assert watcher.num_samples[0, 0] == (18, 6)


def test_weights_that_fit_no_world_are_refused():
    with pytest.raises(UsageError, match=r"one weight for each of train.num_workers = 3; set .* = 2"):
        resolve(TrainConfig(num_workers=3, strategy="horovod", launcher="local", rank_weights=(1, 2)), SparkConfig())
    with pytest.raises(ValidationError, match="greater than 0"):
        TrainConfig(num_workers=2, strategy="horovod", launcher="local", rank_weights=(1, 0))
    other = TrainConfig(num_workers=2, strategy="horovod", launcher="local", rank_weights=(1, 2), reader="petastorm")
    with pytest.raises(UsageError, match="train.rank_weights with train.reader = 'petastorm'"):
        check_terms(other, SparkConfig())
