"""Sharded updates: each rank has the whole model, and the optimizer state of its rows alone.

ZeRO stage 1 (Rajbhandari et al., arXiv:1910.02054). Gradients are summed as under plain data parallelism; then each
rank updates some rows of every weight, and the ranks exchange what they have updated. So all have equal bits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from train.api import Build, Member, RankState, SharedModel, Strategy, num_bytes, replicated_state
from train.backends.torch.layout import WholeTensors, whole_slice
from train.checkpoints.arrays import TensorSlice
from train.config import TrainConfig
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies import mesh_of
from train.strategies.collective import AnnouncedCollective
from train.strategies.sharded.member import ShardedMember, Sharding
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner


class ShardedUpdates(WholeTensors):
    """Rank `rank` of `num_ranks` updates its rows of each weight; all update a weight without an axis."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def state_slice(self, elements: TensorSlice) -> TensorSlice:
        if not elements.shape:
            return elements
        first, end = self._rows(elements.shape[0], self._rank)
        return TensorSlice(elements.global_shape, (first, *elements.offsets[1:]), (end - first, *elements.shape[1:]))

    def updated(self, weights: Sequence[Any]) -> list[Any]:
        import torch

        return [torch.nn.Parameter(self.for_update(weight.detach())) if weight.dim() else weight for weight in weights]

    def for_update(self, gradient: Any) -> Any:
        if not gradient.dim():
            return gradient
        first, end = self._rows(gradient.shape[0], self._rank)
        return gradient[first:end]

    def after_update(self, weights: Sequence[Any]) -> None:
        """One exchange of all weights, each rank's rows in a row."""
        import torch
        import torch.distributed as dist

        if self._num_ranks == 1:
            return
        tensors = [weight.detach() for weight in weights if weight.dim()]
        of_ranks = [
            [tensor[slice(*self._rows(len(tensor), rank))] for tensor in tensors] for rank in range(self._num_ranks)
        ]
        sizes = [sum(part.numel() for part in parts) for parts in of_ranks]
        # All must be of one size.
        mine = torch.cat([part.reshape(-1) for part in of_ranks[self._rank]])
        padded = torch.nn.functional.pad(mine, (0, max(sizes) - len(mine)))
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded)
        for rank, (flat, size) in enumerate(zip(received, sizes, strict=True)):
            if rank != self._rank:
                values = flat[:size].split([part.numel() for part in of_ranks[rank]])
                for part, value in zip(of_ranks[rank], values, strict=True):
                    part.copy_(value.view(part.shape))

    def _rows(self, num_rows: int, rank: int) -> tuple[int, int]:
        """First row of a rank, and the one behind its last."""
        return num_rows * rank // self._num_ranks, num_rows * (rank + 1) // self._num_ranks


def join_zero1(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`."""
    # The only backend that this strategy runs with.
    learner = cast("TorchLearner", build(materialized=world.rank == 0))
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    layout = ShardedUpdates(world.rank, world.world_size)
    sharding = Sharding(lambda module, kept: None, layout, lambda learner, addends: collective.sum_tensors(addends))
    return ShardedMember(learner, collective, mesh_of(config).data_index(world.rank), world, reporter, sharding)


def rank_state_of_zero1(config: TrainConfig, module: Any) -> RankState:
    """`SharedModel.rank_state`: the whole model, and the optimizer state of some rows of each weight."""
    whole, num_ranks = replicated_state(config, module), mesh_of(config).num_ranks
    slices = {name: whole_slice(shape) for name, shape in whole.weights.items()}
    of_ranks = [
        {name: layout.state_slice(elements).shape for name, elements in slices.items()}
        for layout in (ShardedUpdates(rank, num_ranks) for rank in range(num_ranks))
    ]
    most = max(of_ranks, key=lambda shapes: num_bytes(shapes.values()))
    # All gradients as one flat tensor; then the rows of every rank, and this one's twice.
    update_bytes = 2 * num_bytes(whole.weights.values()) + (2 * num_bytes(most.values()) if num_ranks > 1 else 0)
    return RankState(whole.weights, most, module, update_bytes=update_bytes)


ZERO1 = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    can_skip_batches=True,
    max_world_size=None,
    join=join_zero1,
    secondary_error=TORCH_DDP.secondary_error,
    shared_model=SharedModel(axes=(), rank_state=rank_state_of_zero1),
)
