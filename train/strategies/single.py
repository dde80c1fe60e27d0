"""The strategy of a single process: the reference for all others."""

from __future__ import annotations

from train.config import TrainConfig
from train.contracts.world import World
from train.strategies.collective import SingleCollective
from train.strategies.replicated import replicated
from train.strategies.strategy import Strategy


def open_single(world: World, config: TrainConfig) -> SingleCollective:
    assert world.world_size == 1, world
    return SingleCollective()


SINGLE = Strategy(
    backends=("keras", "torch"),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    leaves_out_batches=True,
    max_world_size=1,
    join=replicated(open_single),
)
