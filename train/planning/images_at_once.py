"""Computes how many images of a step a rank has at once, and into how many microbatches it may split them."""

from __future__ import annotations

from train.config import TrainConfig
from train.strategies import STRATEGIES, has_chief, mesh_of
from train.strategies.options import LocalSgdOptions, MirroredOptions
from train.strategies.sharded.pipeline_schedules import PipelineOptions, num_microbatches_of


def images_at_once(config: TrainConfig, num_gpus: int = 0) -> int:
    """Images of a step on the rank with most streams, or on one of its `num_gpus`, without microbatches."""
    of_update = -(
        -mesh_of(config).largest_share(config.global_batch_size) // config.options(LocalSgdOptions).local_steps
    )
    return -(-of_update // max(1, num_gpus))


def most_microbatches(config: TrainConfig, num_gpus: int = 0) -> int:
    """Maximum number of microbatches on every rank, with at least one image per device."""
    if has_chief(config) or config.sync_batch_norm:
        return 1
    of_rank = mesh_of(config).smallest_share(config.global_batch_size)
    num_devices = (
        config.options(MirroredOptions).num_devices if STRATEGIES[config.strategy].devices_per_rank == "all" else 1
    )
    return max(1, of_rank // config.options(LocalSgdOptions).local_steps // max(1, num_gpus, num_devices))


def pipeline_microbatches(config: TrainConfig) -> int:
    """Of one pass through a pipeline, of which a step has `accumulation_steps`, on the rank with most streams."""
    num_rows, num_stages = -(-images_at_once(config) // config.num_accumulated), mesh_of(config).shape.pipeline
    return num_microbatches_of(config.options(PipelineOptions), num_rows, num_stages) if num_stages > 1 else 1
