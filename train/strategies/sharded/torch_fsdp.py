"""Fully sharded data parallelism: each rank holds 1/N of weights, gradients and optimizer state (`fully_shard`).

ZeRO stage 3 (Rajbhandari et al., arXiv:1910.02054), by PyTorch's FSDP2: a block's weights are gathered before it
computes and forgotten behind it, and its gradients are summed straight into the shards. With `train.mesh.data` > 1 the
shards exist that many times (hybrid sharding): gathers stay inside a group, and only sums cross it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from train.backends.backend import Learner
from train.backends.torch.blocks import blocks_of
from train.backends.torch.layout import ShardedTensors
from train.backends.torch.runtime import device
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective
from train.strategies.member import Member
from train.strategies.sharded.member import SHARDED, ShardedMember, Sharding
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner


def mesh(config: TrainConfig) -> Mesh:
    """One group of all ranks, unless `train.mesh` says how many groups there are or how large each is."""
    sizes = config.mesh
    return Mesh.of(config, fsdp=sizes.fsdp or max(1, config.num_ranks_asked // max(1, sizes.data)))


def join(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`."""
    axes = mesh(config)
    # The only backend that this strategy runs with; a Keras model was refused by the driver (`needs_module`).
    learner = cast("TorchLearner", build())
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    place = partial(_shard, _device_mesh(axes), config.mixed_precision == "bfloat16")
    sharding = Sharding(place, ShardedTensors(axes.num_ranks, _sum), _exchange, _sum)
    return ShardedMember(learner, collective, axes.data_index(world.rank), world, reporter, sharding)


def _device_mesh(axes: Mesh) -> Any:
    """The ranks of a group beside each other; with one group, one axis."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = init_device_mesh(device().type, (axes.data, axes.fsdp), mesh_dim_names=("data", "fsdp"))
    return whole if axes.data > 1 else whole["fsdp"]


def _shard(device_mesh: Any, is_bfloat16: bool, module: Any, kept: Collection[Any]) -> None:
    """`Place`: block by block, then what is left."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # Gathered in 16 bits; summed in 32, because a sum over many ranks loses more than a weight does.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bfloat16 else MixedPrecisionPolicy()
    for each in [*blocks_of(module), module]:
        fully_shard(each, mesh=device_mesh, mp_policy=policy, ignored_params=set(kept))
        # The loss is divided by the weight of the global batch already: a sum, not a mean.
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)


def _exchange(learner: TorchLearner, is_last: bool) -> None:
    learner.module.set_requires_gradient_sync(is_last)


def _sum(tensor: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(tensor)


TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    leaves_out_batches=True,
    checkpoint_layout=SHARDED,
    needs_module=True,
    max_world_size=None,
    join=join,
    mesh=mesh,
    secondary_error=TORCH_DDP.secondary_error,
)
