"""A rank that holds shards of a PyTorch model: its step, and its files of a checkpoint.

Rank 0 alone builds the model with numbers, and gives each rank those of its shards: a layout never decides with which
numbers a training begins. From then on the whole model is nowhere; a whole tensor is there for the moment in which it
is used, hashed, or exported from the files of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.jobs.observer import WARNING
from shardmill.values import Batch
from train.backends.backend import StatePart
from train.checkpoints.checkpoint import SavedFiles
from train.checkpoints.shards import (
    INDEX,
    WEIGHTS_PART,
    Shard,
    ShardIndex,
    arrays_in_order,
    dump_index,
    read_index,
    shard_file,
)
from train.checkpoints.state import dump_arrays, load_arrays, rank_file
from train.contracts.activities import during, waiting
from train.contracts.mesh import DataIndex
from train.contracts.values import Reporter, from_json, to_json
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective
from train.strategies.collective_member import PARTS, CollectiveMember
from train.strategies.member import MemberStep
from train.strategies.sharded.agreement import Agreement
from train.strategies.sharded.first_numbers import hand_out

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner
    from train.backends.torch.layout import Place, TensorLayout
    from train.backends.torch.passes import MakePasses
    from train.config import TrainConfig


def _exchanges_nothing(learner: TorchLearner, is_last: bool) -> None:
    return


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a strategy shards a model, and what its step does beside the backward pass."""

    place: Place
    """Exchange the weights of a module for this rank's shards."""
    layout: TensorLayout
    """What depends on where they are."""
    add_up: Callable[[TorchLearner, list[Any]], list[Any]]
    """(learner, addends, as `Learner.gradients` returns them): add up, over the ranks that read rows of their own, what
    the backward pass has not."""
    exchange: Callable[[TorchLearner, bool], None] = _exchanges_nothing
    """(learner, whether the next backward pass is the last one of the step): switch the exchange of gradients."""
    make_passes: MakePasses | None = None
    """How a rank computes with its shards; None if the module computes as it is called."""
    draws_alike: bool = True
    """Whether ranks that read the same rows draw the same random numbers, because they compute the same layers."""


class ShardedMember(CollectiveMember):
    """`train.strategies.member.Member` with shards of the model."""

    reads_its_weights = True

    def __init__(
        self,
        learner: TorchLearner,
        collective: AnnouncedCollective,
        data: DataIndex,
        world: World,
        reporter: Reporter,
        sharding: Sharding,
    ) -> None:
        super().__init__(learner, collective, data, world.exchange_aside, rank=world.rank, world_size=world.world_size)
        self._torch_learner = learner
        self._sharding = sharding
        self._reporter, self._has_stepped = reporter, False
        self._waiting = partial(during, reporter, waiting("an allreduce in its step"))
        self._report_whole(reporter)
        numbers = learner.place(sharding.place, sharding.layout, sharding.make_passes)
        self._index = self._agree(list(numbers))
        with during(reporter, waiting("the first weights")):
            of_ranks = [self._index.of_rank(rank, WEIGHTS_PART) for rank in range(self.world_size)]
            hand_out(numbers, of_ranks, list(map(sharding.layout.local, learner.weights)), self.rank)
        learner.state.begin()
        # It never changes, and a step waits for the copy of a checkpoint.
        self._index_file = dump_index(self._index) if self.rank == 0 else []
        # Ranks that draw the same numbers: one of them writes the state of its own.
        self._draws_as = data.index if sharding.draws_alike else self.rank
        drawing = [int(each) for each in self.gather_bytes(str(self._draws_as).encode())]
        self._own_rank = drawing.index(self._draws_as)
        self._agreement: Agreement | None = None

    def compare_steps(self, config: TrainConfig) -> None:
        """From now on, with the ranks that read the same rows; all ranks call it."""
        reads = [int(each) for each in self.gather_bytes(str(self.data.index).encode())]
        of_ranks = [self._index.of_rank(rank, WEIGHTS_PART) for rank in range(self.world_size)]
        self._agreement = Agreement(config, self.gather_bytes, self.rank, reads, of_ranks)

    @property
    def share_of_weights(self) -> float:
        """Of the elements of all weights the part that this rank holds."""
        index = self._index
        mine, whole = (
            sum(math.prod(each.shape) for each in shards)
            for shards in (index.of_rank(self.rank, WEIGHTS_PART), index.whole(WEIGHTS_PART))
        )
        return mine / whole

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        from train.backends.torch.collectives import Moved, blocked, traced

        moved = Moved()
        # The first step warms up anyway.
        with blocked() as waits, nullcontext() if self._has_stepped else traced(moved.add):
            outcome = self.learner.apply(self._addends(batch, global_weight), learning_rate)
        if not self._has_stepped and self.rank == 0:
            sizes = {f"{kind}_bytes": size for kind, size in sorted(moved.bytes_by_kind.items())}
            self._reporter.event("collectives", {"rank": 0, "num_calls": len(moved.calls), **sizes})
        self._has_stepped = True
        return MemberStep(outcome, waits.seconds)

    def own_gradient_is_finite(self, batch: Batch, global_weight: int) -> bool:
        """One rank after the other computes with its rows, and the others with black images that weigh nothing: a
        backward pass adds up the gradients of all."""
        blank = replace(batch, images_NHWC=np.zeros_like(batch.images_NHWC), weights_N=np.zeros_like(batch.weights_N))
        found = [
            self.learner.are_finite(self._addends(batch if turn == self.data.index else blank, global_weight))
            for turn in range(self.data.count)
        ]
        return found[self.data.index]

    def _addends(self, batch: Batch, global_weight: int) -> list[Any]:
        learner, exchange = self._torch_learner, self._sharding.exchange
        with self._waiting():
            exchange(learner, False)
            figures = learner.differentiate(
                batch, global_weight, self.data.fraction, lambda figures: exchange(learner, True)
            )
            mine = figures.clone()
            addends = self._sharding.add_up(learner, [*learner.own_gradients(), figures])
        if self._agreement is not None:
            self._agreement.check(mine, addends[:-1])
        return addends

    def state_files(self) -> dict[str, list[np.ndarray]]:
        files: dict[str, list[np.ndarray]] = {}
        if self.rank == self._own_rank:
            files[rank_file(self.rank)] = self.learner.arrays(StatePart.OWN)
        for state, part in PARTS.items():
            mine = dict(zip(self._shards(part), self.learner.arrays(state), strict=True))
            files[shard_file(part, self.rank)] = [mine[each] for each in self._index.written_by(self.rank, part)]
        return files | ({INDEX: self._index_file} if self.rank == 0 else {})

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        return [self._own_file(saved.names, saved.world_size), *self._files_with(saved, tuple(PARTS.values()))]

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        own = self._own_file(files, saved_world_size)
        if files:
            self._take_shards(files, tuple(PARTS), source)
            self.learner.assign(StatePart.OWN, load_arrays(files[own]), source)
        else:
            mine = dump_arrays(self.learner.arrays(StatePart.OWN)) if self.rank == 0 else b""
            self.learner.assign(StatePart.OWN, load_arrays(self.broadcast_bytes(mine)), "rank 0")
        if own != rank_file(self._own_rank):
            self.learner.decorrelate(self._draws_as)

    def _own_file(self, names: Collection[str], saved_world_size: int) -> str:
        """Where this rank finds state of its own: with other ranks, or if several had read the same rows, that of
        rank 0."""
        own = rank_file(self._own_rank)
        return own if saved_world_size == self.world_size and own in names else rank_file(0)

    def weight_files(self, saved: SavedFiles) -> list[str]:
        return [rank_file(0), *self._files_with(saved, (PARTS[StatePart.WEIGHTS],))]

    def take_weights(self, files: Mapping[str, bytes], source: str) -> None:
        self._take_shards(files, (StatePart.WEIGHTS,), source)
        self.learner.assign(StatePart.OWN, load_arrays(files[rank_file(0)]), source)

    def _take_shards(self, files: Mapping[str, bytes], states: tuple[StatePart, ...], source: str) -> None:
        index = read_index(lambda name: files[name]) if INDEX in files else self._replicated_index
        for state in states:
            self.learner.assign(state, index.assemble(self._shards(PARTS[state]), files, source), source)

    def _files_with(self, saved: SavedFiles, parts: tuple[str, ...]) -> list[str]:
        wanted = [shard for part in parts for shard in self._shards(part)]
        if INDEX in saved.names:
            return [INDEX, *read_index(saved.read).files_with(wanted)]
        return self._replicated_index.files_with(wanted)

    @property
    def _replicated_index(self) -> ShardIndex:
        """That of a checkpoint of a replicated strategy: whole arrays in the order of the same model."""
        return ShardIndex(
            (tuple(shard for part in PARTS.values() for shard in self._index.whole(part)),), is_replicated=True
        )

    def _report_whole(self, reporter: Reporter) -> None:
        """Rank 0 has tried the model and knows the form of its outputs. Some models only build with numbers."""
        learner = self._torch_learner
        learner.outputs_are_logits = from_json(bool, self.broadcast_bytes(to_json(learner.outputs_are_logits)))
        reasons = [from_json(str, each) for each in self.gather_bytes(to_json(learner.why_whole))]
        if self.rank == 0 and any(reasons):
            warning = f"every rank builds the whole model before it keeps its shards: {next(filter(None, reasons))}"
            reporter.event("built_whole", {"rank": 0, WARNING: warning})

    def _agree(self, weights: Sequence[str]) -> ShardIndex:
        """Which rank holds what. `weights`: names of all parameters of the module, in its order."""
        mine = [
            Shard(part, each.name, each.box.global_shape, each.box.offsets, each.box.shape)
            for state, part in PARTS.items()
            for each in self._torch_learner.state.boxes(state)
        ]
        of_ranks = tuple(tuple(from_json(list[Shard], each)) for each in self.gather_bytes(to_json(mine)))
        own = tuple(self._torch_learner.state.own_names())
        return ShardIndex(of_ranks, arrays=arrays_in_order(of_ranks, weights), own=own)

    def _shards(self, part: str) -> list[Shard]:
        return self._index.of_rank(self.rank, part)
