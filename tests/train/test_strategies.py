"""Strategies keep what they declare; the collectives of more than one rank are tried in test_multi_rank.py."""

from __future__ import annotations

import os

import numpy as np
import pytest

from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.registry import Entry
from tests.processes import in_own_process
from tests.train.training import check_terms
from train.config import TrainConfig
from train.contracts.world import World
from train.strategies import STRATEGIES, find_strategy
from train.strategies.horovod import HorovodCollective, join_horovod
from train.strategies.replicated import JoinCollective
from train.strategies.single import open_single


def every_collective_is_the_identity(join: JoinCollective) -> None:
    import tensorflow as tf

    collective = join(World(), TrainConfig())
    tensors = [tf.constant([0.1, 0.2]), tf.constant([[3.0]])]
    for given, summed in zip(tensors, collective.sum_tensors(tensors), strict=True):
        np.testing.assert_array_equal(given, summed)
    np.testing.assert_array_equal(collective.sum_array(np.array([1.5, 2.0**53 - 1])), [1.5, 2.0**53 - 1])
    for data in (b"", b"\x00any bytes"):
        assert collective.broadcast_bytes(data) == data
        assert collective.gather_bytes(data) == [data]
    collective.barrier()
    collective.close()


@pytest.mark.starts("program")
@pytest.mark.parametrize("join", [open_single, join_horovod])
def test_in_a_world_of_one_every_collective_is_the_identity(join):
    in_own_process("keras", every_collective_is_the_identity, join)


def fusion_threshold(bucket_bytes: int) -> str:
    HorovodCollective(World(), bucket_bytes=bucket_bytes).close()
    return os.environ.get("HOROVOD_FUSION_THRESHOLD", "its own")


@pytest.mark.starts("program")
def test_horovod_gets_the_limit_of_one_send():
    """By the variable that it reads when it starts: what it has taken up it does not say."""
    assert (
        in_own_process("keras", fusion_threshold, 20_000) == "20000"
        and in_own_process("keras", fusion_threshold, 0) == "its own"
    )


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_declares_its_world_sizes(name):
    strategy = STRATEGIES[name]
    assert strategy.allows_world_size(1) and not strategy.allows_world_size(0)
    if strategy.max_world_size is not None:
        assert strategy.allows_world_size(strategy.max_world_size) and not strategy.allows_world_size(
            strategy.max_world_size + 1
        )


def test_single_refuses_two_workers_and_names_horovod():
    with pytest.raises(UsageError, match=r"'single' with train.num_workers = 2; expected at most 1 .*\"horovod\""):
        find_strategy("single", 2)
    assert find_strategy("horovod", 64) is STRATEGIES["horovod"]


def test_single_refuses_two_workers_and_names_only_what_is_installed(monkeypatch):
    missing = Entry("train.strategies.horovod:HOROVOD", "", packages=("package_that_is_not_installed",))
    for name in set(STRATEGIES) - {"single"}:
        monkeypatch.setitem(STRATEGIES.entries, name, missing)
    with pytest.raises(UsageError, match=r"'single' with train.num_workers = 2") as refused:
        find_strategy("single", 2)
    assert refused.value.fix == "set train.num_workers = 1"


def test_what_is_offered_fits_the_models_framework_and_the_number_of_workers():
    """The fix of one refusal is not the next one's cause."""
    torch = {"model": "tests.train.torch_models:smooth", "num_workers": 2, "launcher": "local"}
    with pytest.raises(UsageError) as refused:
        check_terms(TrainConfig(strategy="single", **torch), SparkConfig())
    assert refused.value.fix == 'set train.strategy = "torch_ddp", or train.num_workers = 1'
    with pytest.raises(UsageError) as refused:
        check_terms(TrainConfig(strategy="horovod", **torch), SparkConfig())
    assert refused.value.fix == "set train.strategy to 'torch_ddp' or 'local_sgd'"


def test_an_unknown_strategy_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean 'horovod'\?"):
        find_strategy("horvod", 1)


def horovod_refuses_a_world_that_its_launcher_did_not_make() -> None:
    with pytest.raises(TrainingError, match="rank 0 of 1; the launcher said rank 1 of 1"):
        HorovodCollective(World(1, 1))


@pytest.mark.starts("program")
def test_horovod_refuses_a_world_that_its_launcher_did_not_make():
    in_own_process("keras", horovod_refuses_a_world_that_its_launcher_did_not_make)
