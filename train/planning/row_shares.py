"""Computes how the rows of a train split are shared: how many each rank reads per epoch, in how many steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.epoch_plan import PlanSpec, plan_epoch
from shardmill.errors import UsageError
from shardmill.words import counted
from train.readers import reader_of
from train.strategies import mesh_of

if TYPE_CHECKING:
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class RowShares:
    """The rows of one epoch."""

    num_rows: int
    num_steps: int
    global_batch_size: int
    num_streams: int
    rows_of_ranks: tuple[int, ...]
    """Rows by data index (`train.contracts.mesh.Mesh`)."""

    def __str__(self) -> str:
        fewest, most = min(self.rows_of_ranks), max(self.rows_of_ranks)
        each = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
        return (
            f"{counted(self.num_rows, 'row')}, {counted(self.num_steps, 'step')} an epoch of train.global_batch_size "
            f"= {self.global_batch_size}; {each} rows for each of {counted(len(self.rows_of_ranks), 'rank')}, which "
            f"own train.num_streams = {self.num_streams}"
        )


def follows_plan(config: TrainConfig) -> bool:
    """Whether the epoch plan shares the rows out; silos and other readers have rules of their own."""
    return reader_of(config).follows_plan


def row_shares(config: TrainConfig, num_rows: int) -> RowShares:
    """Compute the shares of a split with so many rows. Raises UsageError for more ranks than streams, and for a rank
    without a row.
    """
    mesh = mesh_of(config)
    world_size = mesh.data_size
    # Where chunks end decides which rows a stream has, not how many.
    spec = PlanSpec("", "train", config.seed, config.global_batch_size, mesh.num_streams, 1, shuffle=False)
    plan = plan_epoch(spec, np.array([num_rows]), 0)
    rows_of_ranks = tuple(plan.stream_start(each.stop) - plan.stream_start(each.start) for each in mesh.streams)
    if min(rows_of_ranks) == 0:
        fewer = f", or set train.num_workers to {num_rows} or less" if 0 < num_rows < world_size else ""
        fewer = ", or give that rank more streams (train.rank_weights)" if num_rows >= world_size else fewer
        raise UsageError(
            f"a train split of {counted(num_rows, 'row')} for {counted(world_size, 'rank')}: "
            f"rank {rows_of_ranks.index(0)} gets none",
            "expected at least one row on each rank",
            f"add images, raise etl.split_fractions.train{fewer}",
        )
    return RowShares(num_rows, plan.num_steps, config.global_batch_size, mesh.num_streams, rows_of_ranks)
