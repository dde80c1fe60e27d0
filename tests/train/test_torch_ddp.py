"""The strategy `torch_ddp` in a world of one: collectives change nothing, a resumed member continues as the first."""

from __future__ import annotations

import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from shardmill.errors import TrainingError
from shardmill.values import Batch
from tests.train.training import Recorder
from train.api import StatePart
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec
from train.checkpoints.arrays import dump_arrays
from train.checkpoints.checkpoint import SavedFiles
from train.config import TrainConfig
from train.contracts.world import World
from train.labels import LabelSpec
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective, _meet, join_ddp

SHAPE = (16, 16, 3)
SPEC = ModelSpec(SHAPE, LabelSpec("class", ("a", "b", "c")), InputScale((120.0,) * 3, (60.0,) * 3))


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """The collective names its network interface there."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def batch(seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return Batch(rng.integers(0, 256, (6, *SHAPE), dtype=np.uint8), np.arange(6) % 3, np.ones(6, np.float32),
                 np.arange(6), 0, 0)  # fmt: skip


def config_of(**given: Any) -> TrainConfig:
    return TrainConfig(model="tests.train.torch_models:smooth", strategy="torch_ddp", optimizer="sgd", **given)


def build(config: TrainConfig, **needs: Any) -> Any:
    BACKENDS["torch"].start(World(), 0)
    return BACKENDS["torch"].build(config, SPEC, **needs)


def weights_of(learner: Any) -> list[np.ndarray]:
    return [np.array(each) for each in learner.arrays(StatePart.WEIGHTS)]


def test_in_a_world_of_one_every_collective_is_the_identity():
    import torch

    collective = TorchCollective(World())
    tensors = [torch.tensor([0.1, 0.2]), torch.tensor([[3.0], [4.0]]), torch.tensor(5.0)]
    assert all(map(torch.equal, collective.sum_tensors([each.clone() for each in tensors]), tensors))
    array = np.array([1.5, 2.0**53 - 1])
    np.testing.assert_array_equal(collective.sum_array(array), array)
    for data in (b"", b"\0any bytes"):
        assert collective.broadcast_bytes(data) == data and collective.gather_bytes(data) == [data]
    collective.barrier()
    collective.close()
    # The next one may begin.
    TorchCollective(World()).close()


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_member_steps_and_resumes_as_its_learner_alone(compression):
    config = config_of(compression=compression)
    reporter, alone = Recorder(), build(config)
    first = join_ddp(World(), config, partial(build, config), reporter)
    first.start({}, 0, "")
    alone.assign(StatePart.WEIGHTS, weights_of(first.learner), "the first")
    alone.apply(alone.gradients(batch(0), 6, 1.0), 0.1)
    assert first.train_step(batch(0), 6, 0.1).outcome.is_applied
    sent_whole = compression == "none"
    assert sent_whole == all(map(np.allclose, weights_of(alone), weights_of(first.learner)))
    files = {name: dump_arrays(arrays) for name, arrays in first.state_files().items()}
    outcome, after = first.train_step(batch(1), 6, 0.1).outcome, weights_of(first.learner)
    first.close()

    second = join_ddp(World(), config, partial(build, config), Recorder())
    saved = SavedFiles(1, frozenset(files), files.__getitem__)
    assert sorted(second.files_to_resume(saved)) == sorted(files)
    second.start(files, 1, "the first")
    assert second.train_step(batch(1), 6, 0.1).outcome == outcome
    assert all(map(np.array_equal, weights_of(second.learner), after))
    second.close()
    gradient_bytes = sum(each.nbytes for each in after)
    sizes = {"sent_bytes": gradient_bytes // 2, "gradient_bytes": gradient_bytes}
    assert reporter.named("compression") == ([] if sent_whole else [{"rank": 0, "compression": compression, **sizes}])


def test_ranks_meet_at_the_store_of_rank_0_whoever_comes_later():
    """Rank 2 of 3 never comes: the others do not wait for it here."""
    both, told, stores = threading.Barrier(2), [b"", b""], {}

    def meet(rank: int) -> None:
        def exchange(data: bytes) -> list[bytes]:
            told[rank] = data
            both.wait(20)
            return list(told)

        stores[rank] = _meet(World(rank, 3, exchange=exchange))

    ranks = [threading.Thread(target=meet, args=(rank,), daemon=True) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(20)
    assert stores.keys() == {0, 1}
    stores[0].set("key", "of rank 0")
    assert stores[1].get("key") == b"of rank 0"


def test_a_rank_whose_rank_0_has_no_store_says_so():
    with pytest.raises(TrainingError, match="rank 0 did not open its store"):
        _meet(World(1, 2, exchange=lambda data: [b"{}", data]))


def test_what_the_strategy_declares():
    assert TORCH_DDP.synchronous and TORCH_DDP.exact_resume and TORCH_DDP.syncs_batch_norm
    assert TORCH_DDP.can_skip_batches and TORCH_DDP.max_world_size is None and TORCH_DDP.backends == ("torch",)
    assert set(TORCH_DDP.compressions) == {"none", "fp16", "bf16"}
    for text in (
        "DistNetworkError: gone",
        "NCCL error in: x",
        "ProcessGroupGloo: timeout",
        "connection closed by peer",
    ):
        assert TORCH_DDP.secondary_error.search(text), text
    assert not TORCH_DDP.secondary_error.search("ValueError: a timeout of my own")
