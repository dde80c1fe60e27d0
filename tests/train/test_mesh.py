"""The axes of a training: every stream has one index, every index one rank whose rows count, whatever the axes."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.mesh_shape import MeshShape
from train.planning.auto import resolve
from train.settings.mesh import MeshConfig
from train.strategies import STRATEGIES, mesh_of

AXES = [axes for axes in product((1, 2, 3), repeat=4) if axes[1] * axes[2] <= 8]


@pytest.mark.parametrize("axes", AXES)
def test_the_streams_are_shared_out_once_and_a_group_reads_the_same(axes: tuple[int, int, int, int]):
    mesh = Mesh(MeshShape(*axes), num_streams=8)
    ranks = [mesh.data_index(rank) for rank in range(mesh.num_ranks)]
    assert mesh.num_ranks == axes[0] * axes[1] * axes[2] * axes[3]
    first = [each for each in ranks if each.is_first]
    assert [each.index for each in first] == list(range(mesh.data_size))
    assert [stream for each in first for stream in each.streams] == list(range(8))
    assert sum(each.fraction for each in first) == pytest.approx(1)
    # As many ranks hold each copy of the model, and read what it reads.
    assert set(Counter(each.index for each in ranks).values()) == {axes[0] * axes[3]}
    assert len({(each.index, each.streams) for each in ranks}) == mesh.data_size
    places = [mesh.shape.place(rank) for rank in range(mesh.num_ranks)]
    assert len({tuple(place.values()) for place in places}) == mesh.num_ranks
    for axis, size in mesh.sizes.items():
        # Neighbours along an axis are so many ranks apart.
        assert all(
            places[rank + mesh.shape.stride(axis)] == {**place, axis: place[axis] + 1}
            for rank, place in enumerate(places)
            if place[axis] + 1 < size
        )
    # Neighbours are of one tensor group.
    assert all(ranks[rank].index == ranks[rank - rank % axes[3]].index for rank in range(mesh.num_ranks))


def test_processes_and_readers_are_two_numbers():
    config = TrainConfig(num_workers=16, num_streams=8)
    mesh = Mesh.of(config, tensor=2)
    assert (mesh.num_ranks, mesh.data_size, mesh.shape.data) == (16, 8, 8)
    assert str(mesh) == "train.num_workers = 16 (tensor 2 x data 8)"
    with pytest.raises(UsageError, match=r"train.num_workers = 16 for train.num_streams = 8; .* 8 or less"):
        Mesh.of(config)
    with pytest.raises(UsageError, match=r"num_workers = 16; expected a multiple of 3, .* set train.num_workers = 18"):
        Mesh.of(config, pipeline=3)
    assert Mesh.one_reader(config).data_index(0).streams == range(8)
    with pytest.raises(UsageError, match="rank 16 of train.num_workers = 16"):
        mesh.data_index(16)


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "sizes", "advised"),
    [
        ("torch_ddp", 16, {}, 8),
        ("torch_fsdp", 16, {}, 8),
        ("torch_fsdp", 18, {"fsdp": 3}, 6),
        ("torch_fsdp", 16, {"fsdp": 16}, None),
        ("tensor_parallel", 32, {"tensor": 2}, 16),
        ("pipeline_parallel", 36, {"pipeline": 4}, 32),
        ("hybrid", 32, {}, 16),
    ],
)
def test_the_advised_number_of_ranks_works(strategy: str, num_ranks: int, sizes: dict[str, int], advised: int | None):
    """Eight images are read by at most eight ranks."""
    config = TrainConfig(strategy=strategy, num_workers=num_ranks, mesh=MeshConfig(**sizes), global_batch_size=8)
    fix = f"set train.num_workers = {advised} or less" if advised else "set smaller sizes of train.mesh"
    with pytest.raises(UsageError) as refused:
        mesh_of(config)
    assert refused.value.fix == f"{fix}, or raise train.global_batch_size, which starts a new run"
    if advised:
        assert mesh_of(config.model_copy(update={"num_workers": advised})).num_ranks == advised


def test_sizes_that_ranks_do_not_have_are_refused_with_those_that_they_have():
    config = TrainConfig(strategy="torch_fsdp", num_workers=8, mesh=MeshConfig(data=2, fsdp=2))
    with pytest.raises(UsageError, match=r"mesh.data = 2 .* set train.num_workers = 4, or train.mesh.data = 0 for 4"):
        mesh_of(config)
    for name, strategy in STRATEGIES.installed().items():
        for axis in ("pipeline", "fsdp", "tensor"):
            asked = TrainConfig(strategy=name, num_workers=4, mesh=MeshConfig(**{axis: 2}))
            if axis in strategy.axes:
                assert mesh_of(asked).sizes[axis] == 2
            elif strategy.allows_world_size(4):
                taker = next(other for other, each in STRATEGIES.items() if axis in each.axes)
                with pytest.raises(UsageError, match=rf"mesh.{axis} = 2 .* no such axis; .* '{taker}'"):
                    mesh_of(asked)
    for strategy in ("auto", "pipeline_parallel", "torch_fsdp"):
        both = TrainConfig(strategy=strategy, model="vit", mesh=MeshConfig(pipeline=2, tensor=2))
        wanted = r"^train.mesh.tensor = 2 with train.mesh.pipeline = 2; .* leave train.mesh.tensor or train.mesh.pipel"
        with pytest.raises(UsageError, match=wanted):
            resolve(both, SparkConfig())
    servers = TrainConfig(strategy="parameter_server", num_workers=2, mesh=MeshConfig(data=2))
    with pytest.raises(UsageError, match=r"mesh.data = 2 with .*'parameter_server'.*; leave train.mesh.data at 0"):
        resolve(servers, SparkConfig())


def test_slow_ranks_read_fewer_streams():
    mesh = Mesh.of(TrainConfig(rank_weights=(3, 1), num_streams=8))
    assert [len(each) for each in mesh.streams] == [6, 2] and (mesh.most_streams, mesh.fewest_streams) == (6, 2)
