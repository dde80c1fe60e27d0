"""Fully sharded data parallelism: each rank holds 1/N of weights, gradients and optimizer state.

A block's weights are gathered before it computes and dropped behind it; its gradients are summed straight into the
shards. With `train.mesh.data` > 1 there are as many copies of the shards: gathers stay inside a group, and only sums
cross it.
"""

from __future__ import annotations

from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.strategies.sharded.member import SHARDED
from train.strategies.sharded.placement import sharded
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP


def mesh(config: TrainConfig) -> Mesh:
    """One group of all ranks, unless `train.mesh` says how many groups there are, or how large each is."""
    sizes = config.mesh
    return Mesh.of(config, fsdp=sizes.fsdp or max(1, config.num_ranks_asked // max(1, sizes.data)))


TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    leaves_out_batches=True,
    needs_module=True,
    checkpoint_layout=SHARDED,
    max_world_size=None,
    join=sharded(mesh),
    mesh=mesh,
    secondary_error=TORCH_DDP.secondary_error,
)
