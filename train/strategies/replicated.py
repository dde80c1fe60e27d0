"""Data parallelism: every rank has the whole model and reads its own streams; a collective sums the gradients.

A strategy of this kind only defines its collective. A checkpoint contains weights and optimizer once, written by rank
0, and each rank's own state (moving statistics, generators) in a separate file.

The invariant: between two steps weights and optimizer have the same bits on all ranks, although training never compares
or sends them again after `start`. It holds because `start` broadcasts rank 0's state, each step applies the same sums,
and every decision in a step (skip, loss scale, clipping) depends on them alone. Therefore a checkpoint needs weights
from one rank only. A collective that gives ranks different bits, or an update that uses anything local, breaks this.
All ranks also make the same collective calls in the same order; a call behind a condition that differs between ranks
is a hang, which the watchdog reports.

`CollectiveMember` is the part of it that ranks which hold a model together have, too. `SINGLE`, a single process, is
the reference for all other strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.values import Batch
from train.api import Build, Join, Learner, Member, MemberStep, StatePart, Strategy, SumInStep, moving_statistics
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, dump_arrays, load_arrays, rank_file
from train.checkpoints.checkpoint import SavedFiles
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, whole_arrays, whole_files
from train.config import TrainConfig
from train.contracts.activities import Stopwatch, during, waiting
from train.contracts.mesh import DataIndex, Mesh
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective, Collective, SingleCollective

if TYPE_CHECKING:
    from shardmill.values import Cursor
    from train.api import Batches, Epoch


PARTS = {StatePart.WEIGHTS: WEIGHTS_PART, StatePart.OPTIMIZER: OPTIMIZER_PART}
"""What ranks hold alike, or together, by its name in a checkpoint."""


class CollectiveMember:
    """The part of `train.api.Member` that no step and no checkpoint depends on."""

    shares_checkpoints = True

    def __init__(
        self,
        learner: Learner,
        collective: Collective,
        data: DataIndex,
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.data = data
        self.learner = learner
        self._collective = collective
        # What a member exchanges, and how it leaves, is its collective's.
        self.sum_array, self.broadcast_bytes = collective.sum_array, collective.broadcast_bytes
        self.gather_bytes, self.barrier, self.close = collective.gather_bytes, collective.barrier, collective.close

    def batches(self, epoch: Epoch, cursor: Cursor) -> Batches:
        return epoch.read(cursor.step)

    def average_moving_statistics(self) -> None:
        """Their mean, weighted by the streams of each rank: batch norm updates them from local batches.

        In float64 and with integer weights, so that values that are equal on all ranks (frozen weights) keep their
        exact bits.
        """
        if self.world_size == 1:
            return
        arrays = self.learner.arrays(StatePart.OWN)
        places = moving_statistics(arrays)
        if not places:
            return
        mine = np.concatenate([arrays[place].ravel().astype(np.float64) for place in places])
        # Of ranks that read the same rows one counts.
        num_streams = len(self.data.streams) if self.data.is_first else 0
        means = self._collective.sum_array(mine * num_streams) / self.data.num_streams
        for place in places:
            array = arrays[place]
            arrays[place] = means[: array.size].astype(array.dtype).reshape(array.shape)
            means = means[array.size :]
        self.learner.assign(StatePart.OWN, arrays, "the mean over all ranks")


class ReplicatedMember(CollectiveMember):
    """`train.api.Member` with the whole model."""

    reads_its_weights = False

    def __init__(self, learner: Learner, collective: Collective, data: DataIndex) -> None:
        super().__init__(learner, collective, data, rank=data.index, world_size=data.count)
        self._around_gradients: Callable[[], AbstractContextManager[object]] = nullcontext

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        addends = self._addends(batch, global_weight)
        stopwatch = Stopwatch()
        sums = self._collective.sum_tensors(addends)
        allreduce_seconds = stopwatch.lap()
        return MemberStep(self.learner.apply(sums, learning_rate), allreduce_seconds)

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        return self.learner.are_finite(self._addends(batch, global_weight))

    def _addends(self, batch: Batch, global_weight: int) -> list[Any]:
        with self._around_gradients():
            return self.learner.gradients(batch, global_weight, self.data.fraction)

    def announce_moments(self, reporter: Reporter) -> None:
        """Its gradients contain sums over ranks which are not announced individually: all their time may be waiting."""
        self._around_gradients = partial(during, reporter, waiting("an allreduce in its step"))

    def state_files(self) -> dict[str, list[np.ndarray]]:
        files = {rank_file(self.rank): self.learner.arrays(StatePart.OWN)}
        if self.rank == 0:
            files[WEIGHTS] = self.learner.arrays(StatePart.WEIGHTS)
            files[OPTIMIZER] = self.learner.arrays(StatePart.OPTIMIZER)
        return files

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        """Weights and optimizer reach other ranks by broadcast; a rank's own state counts at an equal world size."""
        if self.rank == 0:
            of_parts = [whole_files(saved.read, saved.names, part) for part in (WEIGHTS_PART, OPTIMIZER_PART)]
            return [*sorted({name for names in of_parts for name in names}), rank_file(0)]
        own = rank_file(self.rank)
        # Ranks that read the same rows have written one file together.
        return [own] if saved.world_size == self.world_size and own in saved.names else []

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        self._take((StatePart.WEIGHTS, StatePart.OPTIMIZER, StatePart.OWN), files if self.rank == 0 else {}, source)
        # After the broadcast, which has just given every rank the moving statistics and generators of rank 0.
        if saved_world_size == self.world_size and rank_file(self.rank) in files:
            self.learner.assign(StatePart.OWN, load_arrays(files[rank_file(self.rank)]), source)
        else:
            self.learner.reseed(self.rank)

    def weight_files(self, saved: SavedFiles) -> list[str]:
        return [*whole_files(saved.read, saved.names, WEIGHTS_PART), rank_file(0)] if self.rank == 0 else []

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        self._take((StatePart.WEIGHTS, StatePart.OWN), files, source)

    def _take(self, parts: Sequence[StatePart], files: Mapping[str, bytes], source: str) -> None:
        """Give all ranks rank 0's state: that in `files`, if there are some, else what it has."""
        for part in parts:
            if files:
                arrays = whole_arrays(files, PARTS[part], source) if part in PARTS else load_arrays(files[rank_file(0)])
                self.learner.assign(part, arrays, source)
            if self.world_size > 1:
                mine = dump_arrays(self.learner.arrays(part)) if self.rank == 0 else b""
                received = self._collective.broadcast_bytes(mine)
                if self.rank > 0:
                    self.learner.assign(part, load_arrays(received), "rank 0")


JoinCollective = Callable[[World, TrainConfig], Collective]
"""Connects this rank to the others; `config.options(...)` are the settings of its strategy."""


MakeMember = Callable[[Learner, AnnouncedCollective, DataIndex], ReplicatedMember]


def replicated(
    join_collective: JoinCollective,
    sum_in_step: SumInStep | None = None,
    make_member: MakeMember = ReplicatedMember,
) -> Join:
    """The `Strategy.join` of replicas that exchange data through a collective.

    `sum_in_step`: what batch norms add up their moments with, if the strategy can. `make_member`: a kind of replica
    that takes its steps otherwise.
    """

    def join(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
        data = Mesh.of(config).data_index(world.rank)
        sums_moments = config.sync_batch_norm and sum_in_step is not None and world.world_size > 1
        # A model that does not build is a user's error on every rank: none should wait for the others then.
        learner = build(sum_in_step=sum_in_step if sums_moments else None)
        collective = AnnouncedCollective(lambda world: join_collective(world, config), world, reporter)
        member = make_member(learner, collective, data)
        if sums_moments:
            member.announce_moments(reporter)
        return member

    return join


def open_single(world: World, config: TrainConfig) -> SingleCollective:
    assert world.world_size == 1, world
    return SingleCollective()


SINGLE = Strategy(
    backends=("keras", "torch"),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    can_skip_batches=True,
    max_world_size=1,
    join=replicated(open_single),
)
