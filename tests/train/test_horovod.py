"""The strategy `horovod` without its processes: a stand-in for Horovod's binding exchanges between threads.

Horovod itself runs in tests of ranks. What is ours is seen here: who sends what, and how the parts are put together.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shardmill.errors import TrainingError
from shardmill.values import Batch
from tests.train.training import MODELS, Recorder
from train.backends import BACKENDS
from train.backends.backend import InputScale, ModelSpec, StatePart
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.mesh import Mesh
from train.contracts.world import World, alone
from train.labels import LabelSpec
from train.strategies.collective import AnnouncedCollective, SingleCollective
from train.strategies.horovod import HOROVOD, TIMELINE, HorovodCollective, HorovodMember, join_horovod, timeline
from train.strategies.horovod_rendezvous import GLOO_ADDRESS

NUM_RANKS = 2
SHAPE = (16, 16, 3)
SPEC = ModelSpec(SHAPE, LabelSpec("class", ("a", "b", "c")), InputScale((120.0,) * 3, (60.0,) * 3))


class StandIn:
    """`horovod.tensorflow` of ranks that are threads of one process; what they are asked, in `calls`."""

    Sum = "sum"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.here = threading.local()
        self.here.world = World()
        self._parts: list[Any] = [None] * NUM_RANKS
        self._all = threading.Barrier(NUM_RANKS, timeout=20)

    def init(self) -> None:
        self.environments.append(dict(os.environ))
        self.here.is_ready = True

    def rank(self) -> int:
        assert self.here.is_ready
        return self.here.world.rank

    def size(self) -> int:
        return self.here.world.world_size

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def start_timeline(self, path: str) -> None:
        self.calls.append(f"start {os.path.basename(path)}")

    def stop_timeline(self) -> None:
        self.calls.append("stop")

    def _of_ranks(self, mine: Any) -> list[Any]:
        if self.size() == 1:
            return [mine]
        self._parts[self.rank()] = mine
        self._all.wait()
        parts = list(self._parts)
        self._all.wait()
        return parts

    def allreduce(self, tensor: Any, op: str, name: str = "", ignore_name_scope: bool = False) -> Any:
        return self.grouped_allreduce([tensor], op, name, ignore_name_scope)[0]

    def grouped_allreduce(self, tensors: list[Any], op: str, name: str = "", ignore_name_scope: bool = False) -> Any:
        import tensorflow as tf

        # An unnamed one outside a compiled function is told by its order.
        assert op == self.Sum and ignore_name_scope == bool(name)
        dtypes = {np.asarray(each).dtype for each in tensors}
        assert len(dtypes) == 1
        self.calls.append(f"{name} {len(tensors)} {dtypes.pop()}".strip())
        of_ranks = self._of_ranks([np.asarray(each) for each in tensors])
        return [tf.constant(np.sum(parts, axis=0, dtype=parts[0].dtype)) for parts in zip(*of_ranks, strict=True)]

    def broadcast(self, array: np.ndarray, root_rank: int) -> Any:
        import tensorflow as tf

        parts = self._of_ranks(array)
        assert array.size and {each.shape for each in parts} == {array.shape}
        return tf.constant(parts[root_rank])

    def allgather(self, array: np.ndarray) -> Any:
        import tensorflow as tf

        return tf.constant(np.concatenate(self._of_ranks(array)))


@pytest.fixture
def horovod(monkeypatch) -> Iterator[StandIn]:
    import horovod as package

    standing_in = StandIn()
    monkeypatch.setitem(sys.modules, "horovod.tensorflow", standing_in)
    monkeypatch.setattr(package, "tensorflow", standing_in, raising=False)
    before = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD")}
    for name in before:
        monkeypatch.delenv(name)
    yield standing_in
    for name in [name for name in os.environ if name.startswith("HOROVOD")]:
        del os.environ[name]
    os.environ.update(before)


def on_ranks(horovod: StandIn, function: Callable[[World], Any]) -> list[Any]:
    """What it returns on each rank."""
    both, told, found = threading.Barrier(NUM_RANKS, timeout=20), [b""] * NUM_RANKS, [None] * NUM_RANKS

    def run(rank: int) -> None:
        def exchange(data: bytes) -> list[bytes]:
            told[rank] = data
            both.wait()
            everything = list(told)
            both.wait()
            return everything

        world = World(rank, NUM_RANKS, rank, NUM_RANKS, exchange=exchange)
        horovod.here.world = world
        found[rank] = function(world)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(NUM_RANKS)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(30)
    return found


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_ranks_get_the_sums_and_each_others_bytes(horovod, compression):
    import tensorflow as tf

    def exchanged(world: World) -> list[Any]:
        collective = HorovodCollective(world, compression)
        tensors = [tf.constant([[0.5, world.rank]]), tf.constant([1.0]), tf.constant([1000.1, 2.0])]
        sums = [np.asarray(each).tolist() for each in collective.sum_tensors(tensors)]
        array = collective.sum_array(np.array([1.5, 10.0 * world.rank])).tolist()
        given = [b"", b"\0of rank 0"] if world.rank == 0 else [b"ignored", b"x"]
        received = [collective.broadcast_bytes(each) for each in given]
        gathered = collective.gather_bytes(b"ab" if world.rank == 0 else b"cdefg")
        some_are_empty = collective.gather_bytes(b"" if world.rank == 0 else b"x")
        collective.barrier()
        collective.close()
        return [sums, array, received, gathered, some_are_empty]

    first, second = on_ranks(horovod, exchanged)
    assert first == second
    sums, *others = first
    assert sums[:2] == [[[1.0, 1.0]], [2.0]] and sums[2] == pytest.approx([2000.2, 4.0], rel=1e-7)
    assert others == [[3.0, 10.0], [b"", b"\0of rank 0"], [b"ab", b"cdefg"], [b"", b"x"]]
    # One group of one type; figures are never halved.
    groups = ["gradients 3 float32"] if compression == "none" else ["halves 2 float16", "figures 1 float32"]
    assert [each for each in horovod.calls if each.split()[0] in ("gradients", "halves", "figures")][::2] == groups
    # All of them knew where the others are.
    assert all(GLOO_ADDRESS in each and each["HOROVOD_SIZE"] == "2" for each in horovod.environments)
    assert len(horovod.environments) == NUM_RANKS and horovod.calls.count("shutdown") == NUM_RANKS


def test_what_horovod_reads_when_it_starts(horovod):
    horovod.here.world = World()
    for config, expected in (
        (TrainConfig(), {}),
        (TrainConfig(bucket_bytes=20_000), {"HOROVOD_FUSION_THRESHOLD": "20000"}),
        (TrainConfig.model_validate({"log": {"profile_steps": "1:2"}}), {"HOROVOD_TIMELINE": "DYNAMIC"}),
    ):
        for name in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE"):
            os.environ.pop(name, None)
        join_horovod(World(), config).close()
        found = {name: value for name, value in horovod.environments[-1].items() if name.startswith("HOROVOD")}
        assert {name: found.get(name) for name in expected} == expected
        # Alone it needs no rendezvous.
        assert GLOO_ADDRESS not in found and len(found) >= len(expected)


def test_a_rank_that_horovod_started_itself_meets_nobody(horovod, monkeypatch):
    monkeypatch.setenv(GLOO_ADDRESS, "there")
    horovod.here.world = world = World(1, 2)
    HorovodCollective(world).close()
    assert horovod.environments[-1][GLOO_ADDRESS] == "there"
    with pytest.raises(TrainingError, match="rank 1 of 2; expected|the launcher said rank 0 of 2"):
        HorovodCollective(World(0, 2))


def learner(config: TrainConfig) -> Any:
    BACKENDS["keras"].start(World(), 0)
    return BACKENDS["keras"].build(config, SPEC)


def batch() -> Batch:
    images_NHWC = np.random.default_rng(0).integers(0, 256, (6, *SHAPE), dtype=np.uint8)
    return Batch(images_NHWC, np.arange(6) % 3, np.ones(6, np.float32), np.arange(6), 0, 0)


@pytest.mark.parametrize("sums_moments", [False, True])
def test_a_members_step_is_that_of_its_learner_and_says_what_it_waits_for(sums_moments):
    told: list[str] = []

    class Telling(Recorder):
        def doing(self, activity: Activity) -> Activity:
            told.append(activity.what)
            return activity

    names: list[str] = []

    def sum_in_step(tensor: Any, name: str) -> Any:
        names.append(name)
        return tensor

    model = f"{MODELS}:{'normed' if sums_moments else 'linear'}"
    config = TrainConfig(model=model, optimizer="sgd", sync_batch_norm=sums_moments)
    one, other = learner(config), learner(config)
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        other.assign(part, one.arrays(part), "the first")
    collective = AnnouncedCollective(lambda world: SingleCollective(), World(), Telling())
    member = HorovodMember(one, collective, Mesh.of(config).data_index(0), alone)
    if sums_moments:
        member.sum_moments_by(sum_in_step, Telling())
    assert (member.rank, member.world_size) == (0, 1)
    told.clear()
    step = member.train_step(batch(), 6, 0.1)
    assert step.outcome.loss == pytest.approx(other.apply(other.gradients(batch(), 6, 1.0), 0.1).loss, rel=1e-5)
    for mine, its in zip(one.arrays(StatePart.WEIGHTS), other.arrays(StatePart.WEIGHTS), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert bool(names) == sums_moments
    assert [each for each in told if each != "its own work"][: 1 + sums_moments] == (
        ["an allreduce in its step", "an allreduce"] if sums_moments else ["an allreduce"]
    )


@pytest.mark.parametrize(("rank", "calls"), [(0, [f"start {TIMELINE}", "inside", "stop"]), (1, ["inside"])])
def test_rank_0_has_the_timeline(horovod, tmp_path, rank, calls):
    horovod.here.world, horovod.here.is_ready = World(rank, 2), True
    with timeline(tmp_path):
        horovod.calls.append("inside")
    assert horovod.calls == calls


def test_what_the_strategy_declares():
    assert HOROVOD.synchronous and HOROVOD.exact_resume and HOROVOD.syncs_batch_norm and HOROVOD.leaves_out_batches
    assert HOROVOD.max_world_size is None and HOROVOD.backends == ("keras",)
    assert set(HOROVOD.compressions) == {"none", "fp16"}
    for text in (
        "HorovodInternalError",
        "Horovod has been shut down",
        "horovodgroupedallreduce",
        "Connection closed by peer",
    ):
        assert HOROVOD.secondary_error.search(text), text
    assert not HOROVOD.secondary_error.search("ValueError: horovod")
