"""The strategies whose ranks hold one PyTorch module together: each is a mesh.

`zero1`: train/strategies/sharded/zero1.py. `pipeline_parallel`: train/strategies/sharded/pipeline.py.

`torch_fsdp`: each rank holds 1/N of weights, gradients and optimizer state. A block's weights are gathered before it
computes and dropped behind it; its gradients are summed straight into the shards. With `train.mesh.data` > 1 there are
as many copies of the shards: gathers stay inside a group, and only sums cross it.

`tensor_parallel`: the ranks of a group hold each layer together and read the same rows; copies of the model
(`train.mesh.data`) add up gradients. `hybrid` also shards what is left of the weights along `train.mesh.fsdp`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.strategies.sharded import pipeline
from train.strategies.sharded.placement import check_layers_of, held_on, sharded
from train.strategies.sharded.zero1 import held_by_zero1, join_zero1
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP


def fsdp_mesh(config: TrainConfig) -> Mesh:
    """One group of all ranks, unless `train.mesh` says how many groups there are, or how large each is."""
    sizes = config.mesh
    return Mesh.of(config, fsdp=sizes.fsdp or max(1, config.num_ranks_asked // max(1, sizes.data)))


def tensor_mesh(config: TrainConfig) -> Mesh:
    """One group of all ranks, unless `train.mesh` says otherwise."""
    sizes = config.mesh
    return Mesh.of(config, tensor=sizes.tensor or max(1, config.num_ranks_asked // max(1, sizes.data)))


def hybrid_mesh(config: TrainConfig) -> Mesh:
    """Groups of two that divide layers, because they exchange most, and as many shards as the ranks leave."""
    sizes, num_ranks = config.mesh, config.num_ranks_asked
    tensor = sizes.tensor or (2 if num_ranks % 2 == 0 else 1)
    fsdp = sizes.fsdp or max(1, num_ranks // (tensor * max(1, sizes.data)))
    return Mesh.of(config, fsdp=fsdp, tensor=tensor)


TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    leaves_out_batches=True,
    needs_module=True,
    max_world_size=None,
    join=sharded(fsdp_mesh),
    mesh=fsdp_mesh,
    held=held_on(fsdp_mesh),
    secondary_error=TORCH_DDP.secondary_error,
)


def _with_divided_layers(mesh: Callable[[TrainConfig], Mesh]) -> Strategy:
    return replace(
        TORCH_FSDP,
        join=sharded(mesh),
        mesh=mesh,
        held=held_on(mesh),
        check_learner=check_layers_of(mesh),
    )


ZERO1 = replace(TORCH_FSDP, join=join_zero1, mesh=Mesh.of, held=held_by_zero1)
TENSOR_PARALLEL = _with_divided_layers(tensor_mesh)
HYBRID = _with_divided_layers(hybrid_mesh)
PIPELINE_PARALLEL = replace(
    TORCH_FSDP,
    join=pipeline.join_pipeline,
    mesh=pipeline.pipeline_mesh,
    held=pipeline.holds_stages,
    check=pipeline.check,
    less_work="or give its stage fewer layers (by the model's `stages()`, or with more ranks)",
    check_learner=pipeline.check_learner,
)
