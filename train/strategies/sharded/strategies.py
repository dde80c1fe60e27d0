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

from train.strategies.sharded import pipeline, zero1
from train.strategies.sharded.placement import check_layers_of, held_when_placed, join_placed
from train.strategies.shared_model import SharedModel
from train.strategies.strategy import Strategy
from train.strategies.torch_ddp import TORCH_DDP

TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    leaves_out_batches=True,
    max_world_size=None,
    join=join_placed,
    secondary_error=TORCH_DDP.secondary_error,
    shared_model=SharedModel(axes=("fsdp",), held=held_when_placed, is_for_large_models=True),
)
TENSOR_PARALLEL = replace(
    TORCH_FSDP,
    shared_model=SharedModel(
        axes=("tensor",),
        held=held_when_placed,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
HYBRID = replace(
    TORCH_FSDP,
    shared_model=SharedModel(
        axes=("fsdp", "tensor"),
        held=held_when_placed,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
ZERO1 = replace(
    TORCH_FSDP,
    join=zero1.join_zero1,
    shared_model=SharedModel(axes=(), held=zero1.held_by_zero1),
)
PIPELINE_PARALLEL = replace(
    TORCH_FSDP,
    join=pipeline.join_pipeline,
    check=pipeline.check,
    less_work="or give its stage fewer layers (by the model's `stages()`, or with more ranks)",
    shared_model=SharedModel(
        axes=("pipeline",),
        held=pipeline.holds_stages,
        check_learner=pipeline.check_learner,
    ),
)
