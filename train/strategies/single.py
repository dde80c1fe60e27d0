"""The strategy of a single process: the reference for all others."""

from __future__ import annotations

from train.config import TrainConfig
from train.contracts.mesh_shape import MeshShape
from train.contracts.world import World
from train.strategies.collective import SingleCollective
from train.strategies.exchanges import exchanges_nothing
from train.strategies.replicated import replicated
from train.strategies.strategy import Strategy


def open_single(world: World, config: TrainConfig) -> SingleCollective:
    assert world.world_size == 1, world
    return SingleCollective()


def _of_several(config: TrainConfig, mesh: MeshShape) -> str:
    """One rank alone exchanges nothing: what several would do is of interest."""
    return "torch_ddp" if config.backend == "torch" else "horovod"


SINGLE = Strategy(
    backends=("keras", "torch"),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    leaves_out_batches=True,
    max_world_size=1,
    join=replicated(open_single),
    replica_exchanges=exchanges_nothing,
    curve_of=_of_several,
)
