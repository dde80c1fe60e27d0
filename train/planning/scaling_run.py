"""The curve of scaling that a run's report shows: predicted from the times of the run's own steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.storage import Store
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import weight_bytes
from train.config import TrainConfig
from train.contracts.mesh_shape import AXES_OF_LAYERS, MeshShape
from train.contracts.values import Blocks
from train.planning.images_at_once import pipeline_microbatches
from train.planning.scaling_step import undivided_axis
from train.planning.scaling_table import Planned, scaling_table
from train.reporting.rank_times import MIN_STEPS, RankRow
from train.strategies import STRATEGIES, declared, mesh_of
from train.strategies.exchanges import Work
from train.strategies.sharded.pipeline_schedules import PipelineOptions

NETWORK_GBIT = 10.0
"""As `shardmill plan` assumes it."""


def scaling_of_run(
    config: TrainConfig, rows: Sequence[RankRow], store: Store, checkpoint: str, blocks: Blocks | None
) -> dict[str, Any] | None:
    """The document of a `ScalingTable` with a point for this run; None if too few steps were timed, if what its
    strategy exchanges is not known, or if its ranks divide no layer and no other strategy's curve stands for it."""
    if not has_curve(config.strategy, blocks) or min((each.num_steps for each in rows), default=0) < MIN_STEPS:
        return None
    try:
        num_bytes = weight_bytes(open_checkpoint(store, checkpoint))
    except ShardmillError:
        return None
    mesh = mesh_of(config)
    shape = mesh.shape
    drawn = drawn_strategy(config, shape)
    if drawn is None:
        return None
    computing, exchanging = (
        statistics.mean(each.seconds[part] / each.num_steps for each in rows) for part in ("compute", "allreduce")
    )
    work = work_of(config, computing * shape.tensor * shape.pipeline, num_bytes, blocks or Blocks())
    document = scaling_table(Planned(drawn, work, "measured in this run", shape, NETWORK_GBIT)).document()
    here = {"num_ranks": mesh.num_ranks, "efficiency": computing / (computing + exchanging)}
    return {**document, "this_run": here}


def has_curve(strategy: str, blocks: Blocks | None) -> bool:
    """Whether its exchanges follow from what a run knows; those of divided layers need what blocks hand on."""
    found = declared(strategy)
    if found is None or found.exchanges is None or not found.times_exchanges:
        return False
    return bool(blocks) or not set(found.axes) & set(AXES_OF_LAYERS)


def drawn_strategy(config: TrainConfig, mesh: MeshShape) -> str | None:
    """The name of the strategy whose curve is drawn. None if its ranks divide no layer: a curve would keep that."""
    drawn = STRATEGIES[config.strategy].curve_of(config, mesh)
    return None if undivided_axis(drawn, mesh) else drawn


def work_of(config: TrainConfig, step_seconds: float, num_bytes: int, blocks: Blocks) -> Work:
    """The `Work` of a planned training, whose step takes one rank with all `num_bytes` of the model so long."""
    mesh = mesh_of(config)
    local_batch_size = mesh.largest_share(config.global_batch_size)
    handed_on = blocks.border_bytes or blocks.image_bytes if mesh.shape.pipeline > 1 else blocks.image_bytes
    return Work(
        step_seconds,
        local_batch_size,
        gradient_bytes=num_bytes,
        weight_bytes=num_bytes,
        block_bytes=handed_on * local_batch_size,
        num_blocks=blocks.num_blocks,
        num_passes=config.num_accumulated,
        num_microbatches=pipeline_microbatches(config),
        schedule=config.options(PipelineOptions).schedule,
    )
