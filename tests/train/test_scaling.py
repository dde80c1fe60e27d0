"""The model of scaling: its collectives against counted messages, its limits, and published measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.errors import UsageError
from train.config import TrainConfig
from train.contracts.mesh_shape import AXES_OF_LAYERS, MeshShape
from train.contracts.values import Blocks
from train.planning.scaling_run import drawn_strategy, has_curve
from train.planning.scaling_step import SIZES, mesh_for, predict
from train.planning.scaling_table import Planned, assumptions_of, scaling_table
from train.strategies import STRATEGIES, axes_of, exchanges_of
from train.strategies.exchanges import Assumed, Work
from train.strategies.network import (
    Link,
    Network,
    all_gather,
    fastest_allreduce,
    halving_allreduce,
    hierarchical_allreduce,
    ring_allreduce,
    tree_allreduce,
)

LINK = Link(1e-5, 1e9)
FLAT = Network(LINK, LINK)
WORK = Work(0.1, 32, gradient_bytes=1e8, weight_bytes=1e8, state_bytes=3e8, block_bytes=1e6, num_blocks=12,
            num_microbatches=8)  # fmt: skip
ALONE = MeshShape()
DIVIDED_AXES = {name: axis for name in STRATEGIES for axis in axes_of(name) if axis in AXES_OF_LAYERS}
"""The axis that makes the strategy what it is."""


def ring_by_counting(num_ranks: int, num_bytes: float) -> float:
    """Each of 2 (N - 1) rounds sends one part of N."""
    return sum(LINK.seconds(1, num_bytes / num_ranks) for _ in range(2 * (num_ranks - 1)))


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 100])
def test_a_ring_is_a_number_of_messages(num_ranks: int):
    group = FLAT.group(num_ranks)
    assert ring_allreduce(group, 1e8) == pytest.approx(ring_by_counting(num_ranks, 1e8))
    assert 2 * all_gather(group, 1e8) == pytest.approx(ring_allreduce(group, 1e8))


def test_which_allreduce_is_fastest_depends_on_bytes_and_ranks():
    many = FLAT.group(1024)
    assert fastest_allreduce(many, 1e3)[1] == "tree"
    assert halving_allreduce(many, 1e8) < ring_allreduce(many, 1e8) < tree_allreduce(many, 1e8)
    # Hosts of eight: the slow network carries a part of the messages.
    hosts = Network(LINK, Link(1e-6, 1e11), ranks_per_host=8).group(1024)
    assert hierarchical_allreduce(hosts, 1e8) < ring_allreduce(hosts, 1e8)
    assert hierarchical_allreduce(FLAT.group(16), 1e8) == pytest.approx(ring_allreduce(FLAT.group(16), 1e8))


def test_groups_of_an_outer_axis_share_the_network_of_a_host():
    network = Network(LINK, Link(1e-6, 1e11), ranks_per_host=4)
    assert network.group(4).slowest == network.within_host
    inner = network.group(4, stride=4)
    assert inner.ranks_per_host == 1 and inner.slowest.bytes_per_second == LINK.bytes_per_second / 4


def test_an_idle_share_is_that_of_the_schedule():
    """The formulas of arXiv:1811.06965 and arXiv:2104.04473, 2.2; that of zero bubble is less than both."""
    steps = {
        name: predict("pipeline_parallel", replace(WORK, schedule=name), MeshShape(pipeline=4), Assumed(FLAT))
        for name in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
    }
    idle = {name: step.bubble_seconds / (step.bubble_seconds + step.compute_seconds) for name, step in steps.items()}
    assert idle["gpipe"] == idle["1f1b"] == pytest.approx(3 / 11)
    assert idle["interleaved_1f1b"] == pytest.approx(3 / 19) and idle["zero_bubble"] < idle["interleaved_1f1b"]
    # Half stages send their activations as often again.
    assert steps["interleaved_1f1b"].exchange_seconds > steps["1f1b"].exchange_seconds


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_has_the_measured_step_and_no_strategy_beats_it(strategy: str):
    assumed = Assumed(FLAT)
    one = predict(strategy, WORK, ALONE, assumed)
    if strategy not in ("parameter_server",):
        assert one.seconds == pytest.approx(WORK.step_seconds) and one.efficiency(WORK) == pytest.approx(1)
    asked = MeshShape(pipeline=2, tensor=2, num_servers=1 if strategy == "parameter_server" else 0)
    steps = [predict(strategy, WORK, mesh, assumed) for size in SIZES if (mesh := mesh_for(strategy, size, asked))]
    assert steps and all(0 < step.efficiency(WORK) <= 1 + 1e-9 for step in steps)
    assert {step.mesh.num_ranks for step in steps} <= set(SIZES)


def test_every_strategy_has_a_model_of_its_exchanges():
    assert all(exchanges_of(name) for name in STRATEGIES)
    # docs/training/parallelism.md names those whose reports have no curve.
    assert {name for name in STRATEGIES if not has_curve(name, Blocks(2, 8))} == {
        "mirrored", "parameter_server", "local_sgd"
    }  # fmt: skip
    assert not has_curve("hybrid", None) and has_curve("torch_fsdp", None)


@pytest.mark.parametrize(("strategy", "backend", "mesh", "drawn"), [
    ("single", "torch", ALONE, "torch_ddp"),
    ("single", "keras", ALONE, "horovod"),
    ("tensor_parallel", "torch", MeshShape(data=2), "torch_ddp"),
    ("pipeline_parallel", "torch", ALONE, "torch_ddp"),
    ("pipeline_parallel", "torch", MeshShape(pipeline=2), "pipeline_parallel"),
    ("hybrid", "torch", MeshShape(fsdp=2), "torch_fsdp"),
    ("hybrid", "torch", MeshShape(fsdp=2, tensor=2), "hybrid"),
    ("torch_fsdp", "torch", ALONE, "torch_fsdp"),
])  # fmt: skip
def test_where_nothing_is_divided_a_report_draws_the_curve_of_what_ranks_do(strategy, backend, mesh, drawn):
    assert drawn_strategy(TrainConfig(strategy=strategy, backend=backend), mesh) == drawn


def test_computation_hides_gradients_but_not_sums_of_activations():
    hiding = Assumed(FLAT, overlap=0.6)
    for strategy in ("torch_ddp", "torch_fsdp"):
        mesh = mesh_for(strategy, 8, ALONE)
        assert mesh is not None
        bare, hidden = (predict(strategy, WORK, mesh, each).seconds for each in (Assumed(FLAT), hiding))
        assert hidden == pytest.approx(max(WORK.step_seconds, bare - 0.6 * WORK.step_seconds))
    divided = [predict("tensor_parallel", WORK, MeshShape(tensor=4), each).seconds for each in (Assumed(FLAT), hiding)]
    assert divided[0] == divided[1] > WORK.step_seconds / 4


def test_shards_cost_three_halves_of_an_allreduce_and_servers_saturate():
    # Without latency: two gathers and one scatter in place of one gather and one scatter.
    free = Assumed(Network(Link(0, 1e9), Link(0, 1e9)), allreduce="ring")
    ddp, fsdp = (predict(name, WORK, mesh_for(name, 16, ALONE) or ALONE, free) for name in ("torch_ddp", "torch_fsdp"))
    assert fsdp.exchange_seconds == pytest.approx(1.5 * ddp.exchange_seconds)
    few, many = (predict("parameter_server", WORK, MeshShape(data=n, num_servers=1), free) for n in (1, 64))
    assert many.seconds == pytest.approx(64 * 2 * WORK.gradient_bytes / 1e9) and few.seconds < many.seconds / 10


# (seconds of a step of 64 images, bytes of gradients): images a second of one P100 from TensorFlow's benchmarks page
# (Inception V3 142, VGG-16 154), parameters of the papers.
P100 = {"Inception V3": (64 / 142, 4 * 23.8e6, 0.90), "VGG-16": (64 / 154, 4 * 138.4e6, 0.68)}


@pytest.mark.parametrize("model", P100)
def test_published_efficiencies_lie_between_no_and_full_overlap(model: str):
    """Horovod's paper: 512 P100 in hosts of four at 25 Gbit/s (TCP or RoCE: 30 us), rings of NCCL."""
    seconds, num_bytes, published = P100[model]
    work = Work(seconds, 64, num_bytes, num_bytes)
    network = Network(Link(30e-6, 25e9 / 8), Link(10e-6, 10e9), ranks_per_host=4)
    low, high = (
        predict("horovod", work, MeshShape(data=512), Assumed(network, overlap, "ring")).efficiency(work)
        for overlap in (0.0, 2 / 3)
    )
    assert low <= published <= high


def test_a_table_says_where_its_inputs_come_from():
    planned = Planned("torch_fsdp", WORK, "measured here", MeshShape(fsdp=4), 10.0)
    table = scaling_table(planned, ("latency_us=5", "ranks_per_host=4", "step_ms=250"))
    sources = {each.name: each.source for each in table.inputs}
    assert sources["latency_us"] == "given" and sources["overlap"] == "assumed"
    assert sources["a step of one rank"] == "given by --assume step_ms"
    document = table.document()
    assert [step["num_ranks"] for step in document["steps"]] == list(SIZES)
    assert document["steps"][0]["step_seconds"] == 0.25 and document["steps"][2]["mesh"]["fsdp"] == 4
    # Four ranks share 128 images today.
    of_batch = [step["images_per_second_at_this_batch"] for step in document["steps"]]
    assert of_batch[2] == pytest.approx(document["steps"][2]["images_per_second"]) and of_batch[-1] is None
    rows = dict(table.rows())
    assert (
        rows["4 ranks"].startswith("fsdp 4: ")
        and "efficiency" in rows["4 ranks"]
        and "0.90 on 512" in rows["published"]
    )


@pytest.mark.parametrize("wrong", ["speed=3", "latency_us=fast", "overlap=2", "allreduce=star", "ranks_per_host=0"])
def test_an_assumption_that_is_none_is_refused(wrong: str):
    with pytest.raises(UsageError, match="--assume"):
        assumptions_of([wrong])


def test_a_strategy_without_a_model_is_refused():
    with pytest.raises(UsageError, match="expected a strategy whose exchanges are known"):
        scaling_table(Planned("my.own:STRATEGY", WORK, "", ALONE, 10.0))


@pytest.mark.parametrize("strategy", DIVIDED_AXES)
def test_a_curve_of_ranks_that_divide_nothing_is_refused(strategy: str):
    axis = DIVIDED_AXES[strategy]
    for mesh in (ALONE, MeshShape(data=3)):
        with pytest.raises(UsageError, match=rf"{strategy}' on [13] rank.* expected train.mesh.{axis} of 2 or more"):
            scaling_table(Planned(strategy, WORK, "", mesh, 10.0))
    rows = dict(scaling_table(Planned(strategy, WORK, "", replace(ALONE, **{axis: 2}), 10.0)).rows())
    assert "1 rank" not in rows and rows["2 ranks"].startswith(f"{axis} 2: ")
    assert f"{axis} 2" in rows["4 ranks"] and " x " in rows["4 ranks"]


def test_copies_of_shards_keep_their_size():
    assert mesh_for("torch_fsdp", 8, MeshShape(data=2, fsdp=4)) == MeshShape(data=2, fsdp=4)
    assert mesh_for("torch_fsdp", 6, MeshShape(data=2, fsdp=4)) is None
    assert mesh_for("hybrid", 8, replace(ALONE, tensor=2)) == MeshShape(fsdp=4, tensor=2)
