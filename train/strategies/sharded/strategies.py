"""The strategies whose ranks hold one PyTorch module together.

`zero1`: train/strategies/sharded/zero1.py. `pipeline_parallel`: train/strategies/sharded/pipeline.py.

`torch_fsdp`: each rank holds 1/N of weights, gradients and optimizer state. A block's weights are gathered before it
computes and dropped behind it; its gradients are summed straight into the shards. With `train.mesh.data` > 1 there are
as many copies of the shards: gathers stay inside a group, and only sums cross it.

`tensor_parallel`: the ranks of a group hold each layer together and read the same rows; copies of the model
(`train.mesh.data`) add up gradients. `hybrid` also shards what is left of the weights along `train.mesh.fsdp`.
"""

from __future__ import annotations

from dataclasses import replace

from train.config import TrainConfig
from train.contracts.mesh_shape import AXES_OF_LAYERS, MeshShape
from train.strategies.exchanges import Assumed, Exchanged, Work
from train.strategies.network import all_gather, reduce_scatter
from train.strategies.sharded import pipeline, zero1
from train.strategies.sharded.placement import check_layers_of, held_when_placed, join_placed
from train.strategies.shared_model import SharedModel
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP


def _gathers_weights(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """Weights are gathered block by block, forward and backward; gradients are scattered, then summed over copies (ZeRO
    stage 3, arXiv:1910.02054)."""
    blocks = work.num_blocks
    weights, gradients = work.weight_bytes / mesh.tensor / blocks, work.gradient_bytes / mesh.tensor / blocks
    seconds = 0.0
    if mesh.fsdp > 1:
        group = assumed.group(mesh, "fsdp")
        seconds += blocks * (2 * all_gather(group, weights) + reduce_scatter(group, gradients))
    seconds += blocks * assumed.allreduce_seconds(mesh, "data", gradients / mesh.fsdp)
    return Exchanged(hideable=seconds)


def _sums_activations(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """Activations are summed twice in a block's forward pass, and twice in its backward pass (Megatron-LM,
    arXiv:1909.08053); nothing hides that."""
    return Exchanged(
        hideable=assumed.allreduce_seconds(mesh, "data", work.gradient_bytes / mesh.tensor),
        exposed=4 * work.num_blocks * assumed.allreduce_seconds(mesh, "tensor", work.block_bytes),
    )


def _gathers_and_sums(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    exposed = _sums_activations(work, mesh, assumed).exposed
    return replace(_gathers_weights(work, mesh, assumed), exposed=exposed)


def _undivided(config: TrainConfig, mesh: MeshShape) -> str:
    """Ranks that divide no layer exchange what those of another strategy do."""
    if any(mesh.sizes[axis] > 1 for axis in AXES_OF_LAYERS):
        return config.strategy
    return "torch_fsdp" if mesh.fsdp > 1 else "torch_ddp"


TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    leaves_out_batches=True,
    max_world_size=None,
    join=join_placed,
    secondary_error=TORCH_DDP.secondary_error,
    shared_model=SharedModel(
        axes=("fsdp",), held=held_when_placed, exchanges=_gathers_weights, is_for_large_models=True
    ),
)
TENSOR_PARALLEL = replace(
    TORCH_FSDP,
    curve_of=_undivided,
    shared_model=SharedModel(
        axes=("tensor",),
        held=held_when_placed,
        exchanges=_sums_activations,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
HYBRID = replace(
    TORCH_FSDP,
    curve_of=_undivided,
    shared_model=SharedModel(
        axes=("fsdp", "tensor"),
        held=held_when_placed,
        exchanges=_gathers_and_sums,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
ZERO1 = replace(
    TORCH_FSDP,
    join=zero1.join_zero1,
    shared_model=SharedModel(axes=(), held=zero1.held_by_zero1, exchanges=zero1.gathers_updates),
)
PIPELINE_PARALLEL = replace(
    TORCH_FSDP,
    curve_of=_undivided,
    join=pipeline.join_pipeline,
    check=pipeline.check,
    less_work="or give its stage fewer layers (by the model's `stages()`, or with more ranks)",
    shared_model=SharedModel(
        axes=("pipeline",),
        held=pipeline.holds_stages,
        exchanges=pipeline.hands_on_activations,
        check_learner=pipeline.check_learner,
    ),
)
