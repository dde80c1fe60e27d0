"""A rank that holds shards of a PyTorch model: its step, its files of a checkpoint, and what ranks compare.

Rank 0 alone builds the materialized model, and gives each rank the values of its shards: a layout never decides with
which values a training begins. From then on the whole model is nowhere; a whole tensor is there for the moment in which
it is used, hashed, or exported from the files of a checkpoint.

Where ranks divide layers, two comparisons see what nothing else would notice: `check_outputs`, what a module whose
layers a user has divided computes, with what it computed as a whole; and `Agreement`, in steps 1, 2, 4, 8, ..., what
ranks with the same rows have whole (a layer whose sum over ranks is missing, or that draws other numbers on each rank).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.values import Batch
from train.api import Member, MemberStep, StatePart
from train.backends.torch.chain import ANOTHER, TOLERANCE
from train.checkpoints.arrays import dump_arrays, load_arrays, rank_file
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
from train.config import TrainConfig
from train.contracts.activities import during, waiting
from train.contracts.mesh import AXES, DataIndex, MeshShape
from train.contracts.values import Reporter, from_json, to_json
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective
from train.strategies.replicated import PARTS, CollectiveMember

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner
    from train.backends.torch.layout import ShardModule, TensorLayout
    from train.backends.torch.passes import MakePasses


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a strategy shards a model, and what its step does beside the backward pass."""

    place: ShardModule
    """Exchange the weights of a module for this rank's shards."""
    layout: TensorLayout
    """What depends on where they are."""
    add_up: Callable[[TorchLearner, list[Any]], list[Any]]
    """(learner, addends, as `Learner.gradients` returns them): add up, over the ranks that read rows of their own, what
    the backward pass has not."""
    exchange: Callable[[TorchLearner, bool], None] = lambda learner, is_last: None
    """(learner, whether the next backward pass is the last one of the step): switch the exchange of gradients."""
    make_passes: MakePasses | None = None
    """How a rank computes with its shards; None if the module computes as it is called."""
    draws_alike: bool = True
    """Whether ranks that read the same rows draw the same random numbers, because they compute the same layers."""


class ShardedMember(CollectiveMember):
    """`train.api.Member` with shards of the model."""

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
        from train.backends.torch.meta_device import send_first_values

        super().__init__(learner, collective, data, rank=world.rank, world_size=world.world_size)
        self._torch_learner = learner
        self._sharding = sharding
        self._reporter, self._has_stepped = reporter, False
        self._waiting = partial(during, reporter, waiting("an allreduce in its step"))
        self._report_whole(reporter)
        values = learner.place(sharding.place, sharding.layout, sharding.make_passes)
        self._index = self._agree(list(values))
        with during(reporter, waiting("the first weights")):
            of_ranks = [self._index.of_rank(rank, WEIGHTS_PART) for rank in range(self.world_size)]
            send_first_values(values, of_ranks, list(map(sharding.layout.local, learner.weights)), self.rank)
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
            metrics = learner.differentiate(
                batch, global_weight, self.data.fraction, lambda metrics: exchange(learner, True)
            )
            mine = metrics.clone()
            addends = self._sharding.add_up(learner, [*learner.own_gradients(), metrics])
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
            self.learner.reseed(self._draws_as)

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
        """Rank 0 has tried the model and knows the form of its outputs. Some models do not build on `meta`."""
        learner = self._torch_learner
        learner.outputs_are_logits = from_json(bool, self.broadcast_bytes(to_json(learner.outputs_are_logits)))
        reasons = [from_json(str, each) for each in self.gather_bytes(to_json(learner.whole_model_reason))]
        if self.rank == 0 and any(reasons):
            warning = f"every rank builds the whole model before it keeps its shards: {next(filter(None, reasons))}"
            reporter.event("built_whole", {"rank": 0, WARNING: warning})

    def _agree(self, weights: Sequence[str]) -> ShardIndex:
        """Which rank holds what. `weights`: names of all parameters of the module, in its order."""
        mine = [
            Shard(part, each.name, each.elements.global_shape, each.elements.offsets, each.elements.shape)
            for state, part in PARTS.items()
            for each in self._torch_learner.state.slices(state)
        ]
        of_ranks = tuple(tuple(from_json(list[Shard], each)) for each in self.gather_bytes(to_json(mine)))
        own = tuple(self._torch_learner.state.own_names())
        return ShardIndex(of_ranks, arrays=arrays_in_order(of_ranks, weights), own=own)

    def _shards(self, part: str) -> list[Shard]:
        return self._index.of_rank(self.rank, part)


def sum_in_place(tensors: list[Any], group: Any) -> None:
    """All of them at a time, over the ranks of a process group."""
    import torch
    import torch.distributed as dist

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.reshape(tensor.shape))


def sum_over_all(tensor: Any) -> None:
    """Over the ranks of the world."""
    import torch.distributed as dist

    dist.all_reduce(tensor)


def device_mesh_of(shape: MeshShape, axes: Collection[str]) -> Any:
    """A `DeviceMesh` of all ranks with these axes by name; the others have one rank. All ranks call it."""
    from torch.distributed.device_mesh import init_device_mesh

    from train.backends.torch.runtime import device

    names = tuple(axis for axis in AXES if axis in axes)
    return init_device_mesh(device().type, tuple(shape.sizes[axis] for axis in names), mesh_dim_names=names)


# Ranks compute the same numbers by the same kernels; some kernels of GPUs add up in any order.
STEP_TOLERANCE = 1e-3
STEP_TOLERANCE_OF_16_BITS = 0.01


class Agreement:
    """Of one rank with those that read its rows.

    `gather`: every rank's bytes in rank order. `readers`: of each rank what it reads, by a number. `of_ranks`: the
    shards of the weights that each has; those in all lists of a group are whole along the axis that divides layers.
    """

    def __init__(
        self,
        config: TrainConfig,
        gather: Callable[[bytes], list[bytes]],
        rank: int,
        readers: Sequence[int],
        of_ranks: Sequence[Sequence[Shard]],
    ) -> None:
        self._config, self._gather = config, gather
        self._readers = readers
        mine = [set(of_ranks[each]) for each, reads in enumerate(readers) if reads == readers[rank]]
        common = set.intersection(*mine)
        self._places = [place for place, shard in enumerate(of_ranks[rank]) if shard in common and 0 not in shard.shape]
        self._num_steps = 0

    def check(self, metrics: Any, gradients: Sequence[Any]) -> None:
        """After a backward pass; all ranks call it. `metrics`: of its rows, the loss first. `gradients`: of each shard.

        Raises UsageError on every rank if some that read the same rows have different ones.
        """
        self._num_steps += 1
        if self._num_steps & (self._num_steps - 1):
            return
        loss, squares = float(metrics[0]), sum(_square(gradients[place]) for place in self._places)
        told = [each.split() for each in self._gather(f"{loss.hex()} {math.sqrt(squares).hex()}".encode())]
        for what, values in zip(("losses", "gradients"), zip(*told, strict=True), strict=True):
            self._compare(what, [float.fromhex(each.decode()) for each in values])

    def _compare(self, what: str, values: Sequence[float]) -> None:
        tolerance = STEP_TOLERANCE if self._config.mixed_precision == "off" else STEP_TOLERANCE_OF_16_BITS
        for reads in sorted(set(self._readers)):
            group = {rank: values[rank] for rank, each in enumerate(self._readers) if each == reads}
            lowest, highest = min(group, key=lambda rank: group[rank]), max(group, key=lambda rank: group[rank])
            # What is not finite is a fault of its own.
            is_finite = all(map(math.isfinite, group.values()))
            allowed = tolerance * max(map(abs, group.values()))
            if not is_finite or group[highest] - group[lowest] <= allowed:
                continue
            raise UsageError(
                f"train.model = {self._config.model!r}: in step {self._num_steps}, ranks that divide its layers and "
                f"have the same rows have different {what}: rank {lowest} {group[lowest]:.6g}, rank {highest} "
                f"{group[highest]:.6g}",
                f"expected the same on every rank, within {tolerance:.1g} of it: whatever is not divided must be alike",
                "in parallelize(mesh), have what leaves a divided layer added up or gathered over the ranks, in both "
                f"passes; draw random numbers by SampleDropout, not by a seed of each rank; {ANOTHER}",
            )


def _square(gradient: Any) -> float:
    if any(each.is_partial() for each in getattr(gradient, "placements", ())):
        # Its sum over the ranks is yet to come.
        return 0.0
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return float(local.float().square().sum())


# bfloat16 has 8 bits, and rounds in every layer.
TOLERANCE_OF_BFLOAT16 = 0.05


def outputs_of_whole(learner: TorchLearner) -> bytes:
    """For `check_outputs`, on rank 0, whose module is materialized and not divided yet."""
    once_NK, again_NK = _outputs(learner), _outputs(learner)
    # One that draws also in inference computes nothing that can be compared.
    return dump_arrays([once_NK] if np.allclose(once_NK, again_NK, rtol=0, atol=TOLERANCE) else [])


def check_outputs(config: TrainConfig, member: Member, learner: TorchLearner, of_whole: bytes, *, rounds: bool) -> None:
    """Raises UsageError on every rank if one computes other outputs than the whole module; all ranks call it.

    `of_whole`: rank 0's. `rounds`: whether it computes in bfloat16.
    """
    expected = load_arrays(member.broadcast_bytes(of_whole))
    # Moving statistics, and what is frozen, are rank 0's; whoever begins a training or resumes one assigns them anew.
    member.start({}, member.world_size, "")
    if not expected:
        return
    [expected_NK] = expected
    found_NK = _outputs(learner)
    mine = float(np.abs(found_NK - expected_NK).max()) if found_NK.shape == expected_NK.shape else math.inf
    differences = [float(each) for each in member.gather_bytes(str(mine).encode())]
    tolerance = (TOLERANCE_OF_BFLOAT16 if rounds else TOLERANCE) * (1 + float(np.abs(expected_NK).max()))
    wrong = [difference for difference in differences if not difference <= tolerance]
    if wrong:
        raise UsageError(
            f"train.model = {config.model!r}: with its layers divided by parallelize(mesh), {len(wrong)} of "
            f"{len(differences)} ranks compute outputs that differ by up to {max(wrong):.3g} from those of the "
            "undivided module",
            f"expected the same outputs on every rank, within {tolerance:.1g}: ColwiseParallel leaves a part of what a "
            "layer computes on each",
            "pass that part on to a RowwiseParallel layer, gather it by ColwiseParallel(output_layouts=Replicate()), "
            f"leave the layer out of parallelize, {ANOTHER}",
        )


def _outputs(learner: TorchLearner) -> Any:
    """Of two images, in inference and in float32."""
    import torch

    from train.backends.torch.chain import tried_images
    from train.backends.torch.passes import on_device

    parts = learner.parts
    parts.classifier.eval()
    with torch.no_grad():
        outputs_NK = parts.classifier(on_device(tried_images(parts.image_shape_HWC))).cpu().numpy()
    learner.layout.forget(learner.module)
    return outputs_NK
