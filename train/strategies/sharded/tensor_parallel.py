"""Tensor parallelism: the ranks of a group hold each layer together and read the same rows (arXiv:1909.08053).

`tensor_parallel` divides layers, and adds up gradients over copies of the model (`train.mesh.data`); `hybrid` also
shards what is left of the weights along `train.mesh.fsdp`, for models whose state does not fit otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.strategies.sharded.placement import sharded
from train.strategies.sharded.torch_fsdp import TORCH_FSDP


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


TENSOR_PARALLEL = replace(TORCH_FSDP, join=sharded(tensor_mesh), mesh=tensor_mesh)
HYBRID = replace(TORCH_FSDP, join=sharded(hybrid_mesh), mesh=hybrid_mesh)
