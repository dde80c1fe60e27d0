"""Keras on several ranks without their processes: a stand-in for Horovod's binding exchanges between threads."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardmill.errors import TrainingError, UsageError
from shardmill.values import Batch
from tests.train.learners import CLIFF, LINEAR, SHAPE, STATEFUL, TORCH_MODELS, batch_of, learner, state
from tests.train.ranks import numbers, train_on_ranks
from tests.train.training import MODELS, Recorder
from train.api import Learner, StatePart
from train.backends import BACKENDS
from train.checkpoints.arrays import WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.activities import Activity, during
from train.contracts.mesh import Mesh
from train.contracts.values import StepReport
from train.contracts.world import World
from train.identity import settings_that_matter
from train.strategies.collective import AnnouncedCollective, AnnouncedSum, SingleCollective
from train.strategies.horovod import (
    GLOO_ADDRESS,
    HOROVOD,
    TIMELINE,
    HorovodCollective,
    HorovodMember,
    join_horovod,
    timeline,
)

NUM_RANKS = 2


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


@pytest.mark.needs("horovod")
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
    # One group of one type; metrics are never halved.
    groups = ["gradients 3 float32"] if compression == "none" else ["halves 2 float16", "metrics 1 float32"]
    assert [each for each in horovod.calls if each.split()[0] in ("gradients", "halves", "metrics")][::2] == groups
    # All of them knew where the others are.
    assert all(GLOO_ADDRESS in each and each["HOROVOD_SIZE"] == "2" for each in horovod.environments)
    assert len(horovod.environments) == NUM_RANKS and horovod.calls.count("shutdown") == NUM_RANKS


@pytest.mark.needs("horovod")
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


@pytest.mark.needs("horovod")
def test_a_rank_that_horovod_started_itself_meets_nobody(horovod, monkeypatch):
    monkeypatch.setenv(GLOO_ADDRESS, "there")
    horovod.here.world = world = World(1, 2)
    HorovodCollective(world).close()
    assert horovod.environments[-1][GLOO_ADDRESS] == "there"
    with pytest.raises(TrainingError, match="rank 1 of 2; expected|the launcher said rank 0 of 2"):
        HorovodCollective(World(0, 2))


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
    one, other = (
        learner("keras", model, sum_in_step=each, optimizer="sgd", sync_batch_norm=sums_moments)
        for each in (sum_in_step, None)
    )
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        other.assign(part, one.arrays(part), "the first")
    collective = AnnouncedCollective(lambda world: SingleCollective(), World(), Telling())
    member = HorovodMember(one, collective, Mesh.of(TrainConfig(sync_batch_norm=sums_moments)).data_index(0))
    if sums_moments:
        member.announce_moments(Telling())
    assert (member.rank, member.world_size) == (0, 1)
    told.clear()
    step = member.train_step(batch_of(SHAPE, 6), 6, 0.1)
    assert step.outcome.loss == pytest.approx(
        other.apply(other.gradients(batch_of(SHAPE, 6), 6, 1.0), 0.1).loss, rel=1e-5
    )
    for mine, its in zip(one.arrays(StatePart.WEIGHTS), other.arrays(StatePart.WEIGHTS), strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-4, atol=1e-6)
    assert bool(names) == sums_moments
    assert [each for each in told if each != "its own work"][: 1 + sums_moments] == (
        ["an allreduce in its step", "an allreduce"] if sums_moments else ["an allreduce"]
    )


@pytest.mark.needs("horovod")
@pytest.mark.parametrize(("rank", "calls"), [(0, [f"start {TIMELINE}", "inside", "stop"]), (1, ["inside"])])
def test_rank_0_has_the_timeline(horovod, tmp_path, rank, calls):
    horovod.here.world, horovod.here.is_ready = World(rank, 2), True
    with timeline(tmp_path):
        horovod.calls.append("inside")
    assert horovod.calls == calls


def test_what_the_strategy_declares():
    assert HOROVOD.synchronous and HOROVOD.exact_resume and HOROVOD.syncs_batch_norm and HOROVOD.can_skip_batches
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


class Reported:
    """A rank's reporter that keeps what the rank did."""

    def __init__(self) -> None:
        self.done = [Activity()]

    def step(self, report: StepReport) -> None:
        return

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        return

    def doing(self, activity: Activity) -> Activity:
        self.done.append(activity)
        return self.done[-2]


class Twice(SingleCollective):
    """As if another rank had the same rows; an operation that TensorFlow cannot look into, as Horovod's is."""

    def __init__(self, is_lost: bool = False) -> None:
        self.now, self._is_lost = 0.0, is_lost

    def sum_tensors(self, tensors):
        import tensorflow as tf

        def meet(*arrays):
            self.now += 3.0
            if self._is_lost:
                raise ConnectionError("the other rank is gone")
            return [2 * each for each in arrays]

        return tf.numpy_function(meet, tensors, [each.dtype for each in tensors])


def announced(collective, reporter=None):
    return AnnouncedCollective(lambda world: collective, World(), reporter or Reported()).sum_inside()


@pytest.mark.parametrize(
    "config",
    [{}, {"accumulation_steps": 3}, {"ema_decay": 0.5}, {"mixed_precision": "float16"}],
    ids=str,
)
def test_one_function_does_what_two_halves_do(config):
    batch = batch_of(SHAPE, num_rows=7)
    # Adam would make steps of the rounding errors that the gradient of a bias below a batch norm is.
    halves, whole = (learner("keras", STATEFUL["keras"], optimizer="sgd", **config) for _ in range(2))
    whole.sum_by(announced(Twice()))
    for _ in range(3):
        expected = halves.apply(Twice().sum_tensors(halves.gradients(batch, 14, 0.5)), 0.1)
        found = whole.whole_step(batch, 14, 0.5, 0.1)
        assert (found.is_applied, found.overflowed) == (expected.is_applied, expected.overflowed) == (True, False)
        both = ((each.loss, each.num_correct, each.gradient_norm) for each in (found, expected))
        np.testing.assert_allclose(*both, rtol=1e-6)
    for part in StatePart:
        for one, other in zip(whole.arrays(part), halves.arrays(part), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("model", [CLIFF, LINEAR], ids=["gradient", "loss"])
def test_what_is_not_finite_changes_nothing(model):
    one = learner("keras", model["keras"])
    one.sum_by(announced(SingleCollective()))
    if model is LINEAR:
        infinite = [np.full_like(each, np.inf) for each in one.arrays(StatePart.WEIGHTS)]
        one.assign(StatePart.WEIGHTS, infinite, "the test")
    before = state(one)
    assert not one.whole_step(batch_of(SHAPE), 4, 1.0, None).is_applied
    assert state(one) == before


def test_waiting_for_the_sum_is_announced_and_timed():
    one, reporter, late, batch = learner("keras", LINEAR["keras"]), Reported(), Twice(), batch_of(SHAPE)
    summed = AnnouncedSum(late, reporter, lambda: late.now)
    one.sum_by(summed)
    for _ in range(2):
        reporter.done = [Activity()]
        with during(reporter, Activity("a step")):
            one.whole_step(batch, 4, 1.0, 0.1)
        assert [(each.what, each.waits) for each in reporter.done[1:]] == [
            ("a step", False), ("an allreduce", True), ("a step", False), ("its own work", False),
        ]  # fmt: skip
        assert summed.seconds == 3.0


def test_with_other_sums_in_front_the_time_before_it_may_be_waiting_and_the_update_is_not():
    one, reporter = learner("keras", LINEAR["keras"]), Reported()
    summed = announced(Twice(), reporter)
    one.sum_by(summed)
    for _ in range(2):
        reporter.done = [Activity()]
        with during(reporter, Activity("a step")):
            summed.expect_others()
            one.whole_step(batch_of(SHAPE), 4, 1.0, 0.1)
        assert [(each.what, each.waits) for each in reporter.done[1:]] == [
            ("a step", False), ("an allreduce in its step", True), ("an allreduce", True), ("a step", False),
            ("its own work", False),
        ]  # fmt: skip


def test_a_sum_that_fails_leaves_the_weights_and_what_the_rank_waited_for():
    one, reporter = learner("keras", LINEAR["keras"]), Reported()
    one.sum_by(announced(Twice(is_lost=True), reporter))
    before = one.weights_sha256()
    with pytest.raises(Exception, match="the other rank is gone"):
        one.whole_step(batch_of(SHAPE), 4, 1.0, 0.1)
    assert one.weights_sha256() == before
    assert reporter.done[-1].waits


# PyTorch's has weights, the first whose gradients are complete, that not all ranks use in a step.
NORMED = {"keras": f"{MODELS}:normed", "torch": f"{TORCH_MODELS}:routed_normed"}
# An epoch's last batch is padded. Adam would make whole steps of gradients that are rounding alone.
STEPS = {"epochs": 4, "num_streams": 12, "global_batch_size": 24, "optimizer": "sgd", "learning_rate": 0.05,
         "checkpoint_every_steps": 3, "checkpoint": {"keep": 9}, "export": "last", "label_smoothing": 0.1}  # fmt: skip


def padded(batch: Batch, num_rows: int) -> Batch:
    """With copies of rows as rows of weight 0."""
    there = len(batch.labels_N)
    rows = np.arange(num_rows) % there
    weights_N = (np.arange(num_rows) < there).astype(np.float32)
    names = ("images_NHWC", "labels_N", "sample_ids_N")
    return replace(batch, weights_N=weights_N, **{name: getattr(batch, name)[rows] for name in names})


def after_a_step(one: Learner, batch: Batch) -> list[np.ndarray]:
    addends = [np.array(each) for each in one.gradients(batch, 6, 1.0)]
    return [*addends, *one.arrays(StatePart.OWN)]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest in relation to the largest number of its array."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6)) for one, other in pairs)


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_does_not_count(name):
    """The framework's own batch norm without padding is the reference."""
    batch = batch_of(SHAPE, num_rows=6)
    expected = after_a_step(learner(name, NORMED[name]), batch)
    one = learner(name, NORMED[name], sync_batch_norm=True)
    assert difference(after_a_step(one, padded(batch, 8)), expected) < 3e-6
    assert difference(after_a_step(learner(name, NORMED[name]), padded(batch, 8)), expected) > 1e-2

    # What is evaluated is the framework's own layer.
    stock = learner(name, NORMED[name])
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        stock.assign(part, one.arrays(part), "the test")
    assert np.array_equal(one.outputs(batch.images_NHWC), stock.outputs(batch.images_NHWC))
    assert one.config_sha256 == stock.config_sha256


@pytest.mark.exhaustive
def test_a_keras_model_on_pytorch_does_likewise(tiny_uri, tmp_path):
    """One rank of it needs a process of its own, too."""
    config = {**STEPS, "strategy": "torch_ddp", "model": NORMED["keras"], "sync_batch_norm": True}
    one, alone = train_on_ranks(tiny_uri, tmp_path / "one", 1, config)
    several, watcher = train_on_ranks(tiny_uri, tmp_path / "several", 2, config)
    assert numbers(watcher.losses) == pytest.approx(numbers(alone.losses), rel=1e-5)
    for name in (WEIGHTS, rank_file(0)):
        files = (tmp_path / "several" / several.last_checkpoint / name, tmp_path / "one" / one.last_checkpoint / name)
        assert difference(*(load_arrays(file.read_bytes()) for file in files)) < 1e-5


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_that_it_does_not_fit_is_refused(name):
    with pytest.raises(UsageError, match=r"linear' has no batch normalization; expected at least one BatchNorm"):
        learner(name, LINEAR[name], sync_batch_norm=True)
    own = LINEAR[name].replace("linear", "with_own_norm")
    with pytest.raises(UsageError, match=r"OwnNorm of train.model = .* has its own (call|forward)\(\)"):
        learner(name, own, sync_batch_norm=True)
    of_patches = learner(name, LINEAR[name].replace("linear", "with_norm_of_patches"), sync_batch_norm=True)
    with pytest.raises(UsageError, match=r"normalizes \d+ rows of a batch of 6; expected one row for each sample"):
        of_patches.gradients(batch_of(SHAPE, num_rows=6), 6, 1.0)


def test_synchronized_it_is_another_training():
    assert "sync_batch_norm" not in settings_that_matter(TrainConfig())
    assert settings_that_matter(TrainConfig(sync_batch_norm=True))["sync_batch_norm"] == "true"
