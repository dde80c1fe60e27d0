"""Computes how many images of a step a rank has at once, and into how many microbatches it may split them."""

from __future__ import annotations

from train.config import TrainConfig
from train.strategies import STRATEGIES, has_chief, mesh_of
from train.strategies.options import LocalSgdOptions, MirroredOptions


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
