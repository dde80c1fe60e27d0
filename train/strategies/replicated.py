"""Data parallelism: every rank has the whole model and reads its own streams; a collective sums the gradients.

A strategy of this kind only defines its collective. A checkpoint contains weights and optimizer once, written by rank
0, and each rank's own state (moving statistics, generators) in a separate file.

The invariant: between two steps weights and optimizer have the same bits on all ranks, although training never compares
or sends them again after `start`. It holds because `start` broadcasts rank 0's state, each step applies the same sums,
and every decision in a step (skip, loss scale, clipping) depends on them alone. Therefore a checkpoint needs weights
from one rank only. A collective that gives ranks different bits, or an update that uses anything local, breaks this.
All ranks also make the same collective calls in the same order; a call behind a condition that differs between ranks
is a hang, which the watchdog reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from shardmill.values import Batch
from train.backends.backend import Learner, StatePart, SumInStep
from train.checkpoints.checkpoint import SavedFiles
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, whole_arrays, whole_files
from train.checkpoints.state import OPTIMIZER, WEIGHTS, dump_arrays, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.activities import during, waiting
from train.contracts.mesh import DataIndex, Mesh
from train.contracts.stopwatch import Stopwatch
from train.contracts.values import Reporter
from train.contracts.world import Gather, World
from train.strategies.collective import AnnouncedCollective, Collective
from train.strategies.collective_member import PARTS, CollectiveMember
from train.strategies.member import Member, MemberStep
from train.strategies.strategy import Join


class ReplicatedMember(CollectiveMember):
    """`train.strategies.member.Member` with the whole model."""

    reads_its_weights = False

    def __init__(self, learner: Learner, collective: Collective, data: DataIndex, gather_aside: Gather) -> None:
        super().__init__(learner, collective, data, gather_aside, rank=data.index, world_size=data.count)
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

    def sum_moments_by(self, sum_in_step: SumInStep, reporter: Reporter) -> None:
        """Set the function for sums inside compiled gradients, which are not announced individually: all their time may
        be waiting.
        """
        self.learner.sum_moments_by(sum_in_step)
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
            self.learner.decorrelate(self.rank)

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
MakeMember = Callable[[Learner, AnnouncedCollective, DataIndex, Gather], ReplicatedMember]


def replicated(
    join_collective: JoinCollective,
    sum_in_step: SumInStep | None = None,
    make_member: MakeMember = ReplicatedMember,
) -> Join:
    """The `Strategy.join` of replicas that exchange data through a collective.

    `sum_in_step`: what batch norms add up their moments with, if the strategy can. `make_member`: a kind of replica
    that takes its steps otherwise.
    """

    def join(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
        data = Mesh.of(config).data_index(world.rank)
        # A model that does not build is a user's error on every rank: none should wait for the others then.
        learner = build()
        collective = AnnouncedCollective(lambda world: join_collective(world, config), world, reporter)
        member = make_member(learner, collective, data, world.exchange_aside)
        if config.sync_batch_norm and sum_in_step and world.world_size > 1:
            member.sum_moments_by(sum_in_step, reporter)
        return member

    return join
