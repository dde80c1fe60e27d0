"""What all ranks do that meet the others by one collective, whatever they hold of the model: the base of members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from train.backends.backend import Learner, StatePart
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART
from train.contracts.mesh import DataIndex
from train.contracts.world import Gather
from train.strategies.collective import Collective

if TYPE_CHECKING:
    from shardmill.values import Cursor
    from train.contracts.epochs import Batches, Epoch

PARTS = {StatePart.WEIGHTS: WEIGHTS_PART, StatePart.OPTIMIZER: OPTIMIZER_PART}
"""What ranks hold alike, or together, by its name in a checkpoint."""


class CollectiveMember:
    """The part of `train.strategies.member.Member` that no step and no checkpoint depends on."""

    def __init__(
        self,
        learner: Learner,
        collective: Collective,
        data: DataIndex,
        gather_aside: Gather,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.data = data
        self.learner = learner
        self._collective = collective
        self._gather_aside = gather_aside

    def batches(self, epoch: Epoch, cursor: Cursor) -> Batches:
        return epoch.read(cursor.step)

    def average_moving_statistics(self) -> None:
        """Their mean, weighted by the streams of each rank: batch norm updates them from local batches.

        In float64 and with integer weights, so that values that are equal on all ranks (frozen weights) keep their
        exact bits.
        """
        places = self.learner.moving_statistics()
        if not places or self.world_size == 1:
            return
        arrays = self.learner.arrays(StatePart.OWN)
        mine = np.concatenate([arrays[place].ravel().astype(np.float64) for place in places])
        # Of ranks that read the same rows one counts.
        num_streams = len(self.data.streams) if self.data.is_first else 0
        means = self._collective.sum_array(mine * num_streams) / self.data.num_streams
        for place in places:
            array = arrays[place]
            arrays[place] = means[: array.size].astype(array.dtype).reshape(array.shape)
            means = means[array.size :]
        self.learner.assign(StatePart.OWN, arrays, "the mean over all ranks")

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return self._collective.sum_array(array)

    def broadcast_bytes(self, data: bytes) -> bytes:
        return self._collective.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self._collective.gather_bytes(data)

    def barrier(self) -> None:
        self._collective.barrier()

    def close(self) -> None:
        self._collective.close()

    def gather_aside(self, data: bytes) -> list[bytes]:
        return self._gather_aside(data)
