"""The curve of scaling that a run's report shows: predicted from the times of the run's own steps."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.storage import Store
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import WEIGHTS_PART
from train.config import TrainConfig
from train.planning.scaling_step import Axes, Work
from train.planning.scaling_table import Planned, scaling_table
from train.reporting.rank_times import MIN_STEPS, RankRow
from train.strategies import mesh_of

NETWORK_GBIT = 10.0
"""As `shardmill plan` assumes it."""
# Their exchanges follow from the size of the model alone.
STRATEGIES_BY_WEIGHTS = ("single", "horovod", "multi_worker_mirrored", "torch_ddp", "zero1", "torch_fsdp")


def scaling_of_run(
    config: TrainConfig, rows: Sequence[RankRow], store: Store, checkpoint: str
) -> dict[str, Any] | None:
    """The document of a `ScalingTable` with a point for this run; None if too few steps were timed, or if the
    exchanges of its strategy do not follow from the size of its model."""
    if config.strategy not in STRATEGIES_BY_WEIGHTS or min((each.num_steps for each in rows), default=0) < MIN_STEPS:
        return None
    weight_bytes = _weight_bytes(store, checkpoint)
    if not weight_bytes:
        return None
    mesh = mesh_of(config)
    computing, exchanging = (
        statistics.mean(each.seconds[part] / each.num_steps for each in rows) for part in ("compute", "allreduce")
    )
    # One rank alone exchanges nothing: what several would do is of interest.
    of_one = "torch_ddp" if config.backend == "torch" else "horovod"
    strategy = of_one if config.strategy == "single" else config.strategy
    work = Work(computing, mesh.largest_share(config.global_batch_size), weight_bytes, weight_bytes)
    axes = Axes(mesh.pipeline, mesh.data, mesh.fsdp, mesh.tensor)
    document = scaling_table(Planned(strategy, work, "measured in this run", axes, NETWORK_GBIT)).document()
    here = {"num_ranks": mesh.num_ranks, "efficiency": computing / (computing + exchanging)}
    return {**document, "this_run": here}


def _weight_bytes(store: Store, checkpoint: str) -> int:
    """Of a replicated checkpoint one file has them; of a sharded one each rank's."""
    try:
        files = open_checkpoint(store, checkpoint).marker.files
    except ShardmillError:
        return 0
    return sum(file.size_bytes for file in files if file.path.rpartition("/")[2].startswith(WEIGHTS_PART))
