"""The strategies `torch_fsdp`, `tensor_parallel` and `hybrid`: a PyTorch module placed on the ranks of a mesh.

Its layers are divided along `tensor`, its weights sharded along `fsdp`.

Both are PyTorch's own: `parallelize_module` by the plan of the model (train/models/tensor_plans.py), then FSDP2's
`fully_shard`, block by block. Tensor parallelism: Shoeybi et al., arXiv:1909.08053; full sharding: Rajbhandari et al.,
ZeRO stage 3, arXiv:1910.02054; shards in several copies (`data` > 1) are called hybrid sharding.

`torch_fsdp`: each rank holds 1/N of weights, gradients and optimizer state. A block's weights are gathered before it
computes and dropped behind it; its gradients are summed straight into the shards. With `train.mesh.data` > 1 there are
as many copies of the shards: gathers stay inside a group, and only sums cross it. `tensor_parallel`: the ranks of a
group hold each layer together and read the same rows; copies of the model (`train.mesh.data`) add up gradients.
`hybrid` also shards what is left of the weights along `train.mesh.fsdp`.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.observer import WARNING
from shardmill.registry import with_line_of_user
from train.api import Build, Member, RankState, SharedModel, Strategy, num_bytes
from train.backends.torch.chain import ANOTHER
from train.config import TrainConfig
from train.contracts.mesh import MeshShape
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies import mesh_of
from train.strategies.collective import AnnouncedCollective
from train.strategies.sharded.member import ShardedMember, Sharding, device_mesh_of, sum_in_place, sum_over_all
from train.strategies.torch_ddp import TORCH_DDP, TorchCollective

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner

LITTLE_DIVIDED = 0.9
"""Share of the weights that a rank holds, beyond which tensor parallelism saves it next to nothing."""
_UNKNOWN_LAYER = re.compile(r"plan key '(.*)' could not be resolved")


def join_placed(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`, along the axes of the strategy's mesh."""
    from train.backends.torch.layout import ShardedTensors
    from train.strategies.sharded.member import check_outputs, outputs_of_whole

    mesh = mesh_of(config)
    # The only backend of these strategies; a Keras model was refused by the driver (`needs_module`).
    learner = cast("TorchLearner", build(materialized=world.rank == 0))
    check_layers(config, learner.module)
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    meshes = DeviceMeshes.of(mesh.shape)
    is_bfloat16 = config.mixed_precision == "bfloat16"
    place = partial(_place, meshes, is_bfloat16)
    sharding = Sharding(place, ShardedTensors(mesh.num_ranks, sum_over_all), partial(_add_up, meshes))
    if meshes.fsdp is not None:
        # FSDP adds up gradients in the last backward pass of a step; before it each rank keeps its own.
        sharding = replace(sharding, exchange=lambda of, is_last: of.module.set_requires_gradient_sync(is_last))
    is_own = meshes.tensor is not None and hasattr(learner.module, "parallelize")
    of_whole = outputs_of_whole(learner) if is_own and world.rank == 0 else b""
    member = ShardedMember(learner, collective, mesh.data_index(world.rank), world, reporter, sharding)
    if is_own:
        check_outputs(config, member, learner, of_whole, rounds=is_bfloat16 and meshes.fsdp is not None)
    num_ranks, share = mesh.shape.tensor, member.share_of_weights
    if num_ranks > 1:
        member.compare_steps(config)
    if world.rank == 0 and num_ranks > 1 and share > LITTLE_DIVIDED:
        reporter.event("little_divided", {"rank": 0, WARNING: _what_stays(config, num_ranks, share, is_own)})
    return member


def _what_stays(config: TrainConfig, num_ranks: int, share: float, is_own: bool) -> str:
    """`is_own`: whether the module divides itself."""
    why, how = "of what is no vision transformer only the last linear layer is divided", "give it a method"
    if is_own:
        why, how = "its parallelize(mesh) divides no more", "have more layers divided by its"
    return (
        f"train.model = {config.model!r}: each of {num_ranks} ranks that divide its layers holds {share:.0%} of the "
        f"weights, because {why}: {how} `parallelize(mesh)`, or set train.strategy = 'torch_fsdp', which shards every "
        "weight"
    )


def rank_state_when_placed(config: TrainConfig, module: Any) -> RankState:
    """`SharedModel.rank_state`: the module is placed on `meta` as on a rank, and counted.

    Not a rule such as 1/N: rows that ranks do not divide are padded, and what tensor parallelism leaves whole is whole
    on each.
    """
    from train.backends.torch.layout import ShardedTensors, kept_whole, slices_of
    from train.backends.torch.meta_device import meta_copy

    mesh = mesh_of(config)
    check_layers(config, module)
    meshes, layout = DeviceMeshes.of(mesh.shape), ShardedTensors(mesh.num_ranks, sum_over_all)
    is_bfloat16 = config.mixed_precision == "bfloat16"
    placed = meta_copy(module)
    _place(meshes, is_bfloat16, placed, kept_whole(placed))
    shapes = {name: elements.shape for name, elements in slices_of(placed, layout).items()}
    if meshes.fsdp is None:
        # Without FSDP a step adds up all gradients of several copies as one flat tensor.
        flat = num_bytes(shapes.values()) if mesh.data_size > 1 else 0
        return RankState(shapes, shapes, placed, update_bytes=flat)
    if meshes.tensor is not None:
        # What FSDP has placed computes with tensors that it has gathered: the layers alone are followed.
        module = copy.deepcopy(module)
        _divide_layers(meshes.tensor, module)
    return RankState(shapes, shapes, module, _gathered_bytes(module, layout.local, 2 if is_bfloat16 else 4))


def check_layers(config: TrainConfig, module: Any) -> None:
    """Raises UsageError for layers that ranks along `tensor` cannot divide."""
    from train.models.tensor_plans import check_heads, heads_of

    if (num_ranks := mesh_of(config).shape.tensor) > 1:
        is_set = config.mesh.tensor > 0
        check_heads(config.model, heads_of(module), num_ranks, config.num_ranks_asked, is_set=is_set)


def check_layers_of(config: TrainConfig, learner: TorchLearner) -> None:
    """`SharedModel.check_learner`."""
    check_layers(config, learner.module)


@dataclass(frozen=True, slots=True)
class DeviceMeshes:
    """The ranks that this one exchanges data with, along each axis that has several; None for the others."""

    tensor: Any
    fsdp: Any
    """Also with an axis `data` in front, whose ranks have equal shards."""
    readers: Any
    """The process group of the ranks that read rows of their own."""

    @classmethod
    def of(cls, shape: MeshShape) -> DeviceMeshes:
        """All ranks call it."""
        whole = device_mesh_of(shape, ("data", "fsdp", "tensor"))
        fsdp = whole["data", "fsdp"] if shape.data > 1 else whole["fsdp"]
        return cls(
            tensor=whole["tensor"] if shape.tensor > 1 else None,
            fsdp=fsdp if shape.fsdp > 1 or shape.tensor == 1 else None,
            readers=whole["data", "fsdp"]._flatten("readers").get_group(),
        )


def _place(meshes: DeviceMeshes, is_bfloat16: bool, module: Any, kept: Collection[Any]) -> None:
    """`train.backends.torch.layout.ShardModule`."""
    frozen = [name for name, parameter in module.named_parameters() if parameter in kept]
    if meshes.tensor is not None:
        _divide_layers(meshes.tensor, module)
        _check_whole(module, frozen)
    if meshes.fsdp is not None:
        _shard(meshes.fsdp, is_bfloat16, module, kept)


def _divide_layers(device_mesh: Any, module: Any) -> None:
    """A module with a method `parallelize(mesh)` divides itself. Raises UsageError if that fails."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    from train.models.tensor_plans import attention_in, split_attention, tensor_plan

    if hasattr(module, "parallelize"):
        _divide_by_its_own(device_mesh, module)
        return
    styles = {
        "column": ColwiseParallel(),
        "row": RowwiseParallel(),
        "column_gathered": ColwiseParallel(output_layouts=Replicate()),
    }
    plan = tensor_plan(split_attention(module))
    parallelize_module(module, device_mesh, {name: styles[split] for name, split in plan.items()})
    for each in attention_in(module):
        each.register_forward_pre_hook(partial(_share_input, device_mesh))


def _divide_by_its_own(device_mesh: Any, module: Any) -> None:
    name = f"parallelize(mesh) of {type(module).__name__}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            module.parallelize(device_mesh)
        except ShardmillError:
            raise
        except Exception as error:
            raise UsageError(
                f"{name} failed: {with_line_of_user(error)}",
                "expected it to divide layers of the model, in place",
                f"correct it, {ANOTHER}",
            ) from error
    # PyTorch goes on without the layer.
    if unknown := [each for found in caught for each in _UNKNOWN_LAYER.findall(str(found.message))]:
        raise UsageError(
            f"{name} names the layer {unknown[0]!r}, which the model has not",
            f"expected one of its layers, or part of one: {', '.join(dict(module.named_children()))}",
            "correct the name in its plan",
        )
    for found in caught:
        warnings.warn_explicit(found.message, found.category, found.filename, found.lineno)


def _check_whole(module: Any, frozen: Collection[str]) -> None:
    """Raises UsageError if a module has divided frozen weights, which each rank has as its own state."""
    from torch.distributed.tensor import DTensor

    parameters = dict(module.named_parameters())
    if divided := [name for name in frozen if isinstance(parameters.get(name), DTensor)]:
        raise UsageError(
            f"train.freeze holds {divided[0]} still, and the model's own parallelize(mesh) divides it",
            "expected frozen weights to stay whole on every rank",
            "leave what has requires_grad = False out of parallelize, or remove it from train.freeze",
        )


def _share_input(device_mesh: Any, attention: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Query, key and value take one tensor: its gradient is added up over the ranks once, not once for each of them."""
    from torch.distributed.tensor import DTensor, Replicate

    return (DTensor.from_local(inputs[0], device_mesh, (Replicate(),), run_check=False),) * len(inputs)


def _shard(device_mesh: Any, is_bfloat16: bool, module: Any, kept: Collection[Any]) -> None:
    """Block by block, then what is left."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from train.backends.torch.recompute import blocks_of

    # Gathered in 16 bits; summed in 32, because a sum over many ranks loses more than a weight does.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bfloat16 else MixedPrecisionPolicy()
    for each in [*blocks_of(module), module]:
        fully_shard(each, mesh=device_mesh, mp_policy=policy, ignored_params=set(kept))
        # The loss is divided by the weight of the global batch already: a sum, not a mean.
        each.set_gradient_divide_factor(1.0)
        each.set_force_sum_reduction_for_comms(True)


def _add_up(meshes: DeviceMeshes, learner: TorchLearner, addends: list[Any]) -> list[Any]:
    """Sum, in place, what the backward pass has not: (loss, number correct), and without FSDP the gradients."""
    import torch.distributed as dist

    if dist.get_world_size(meshes.readers) == 1:
        return addends
    unsummed = addends if meshes.fsdp is None else addends[-1:]
    sum_in_place([learner.layout.local(each) for each in unsummed], meshes.readers)
    return addends


def _gathered_bytes(module: Any, local: Callable[[Any], Any], bytes_per_element: int) -> int:
    """Weights outside the blocks for a whole step; of the largest block the weights, those of the next one, which are
    gathered meanwhile, and the gradients before each rank keeps its shard of their sum."""
    from train.backends.torch.recompute import blocks_of

    def num_elements(parameters: Iterable[Any]) -> int:
        # Frozen weights are whole on each rank.
        return sum(local(each).numel() for each in parameters if each.requires_grad)

    blocks = [num_elements(block.parameters()) for block in blocks_of(module)]
    outside, largest = num_elements(module.parameters()) - sum(blocks), max(blocks, default=0)
    return bytes_per_element * (outside + 3 * largest)


TORCH_FSDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    can_skip_batches=True,
    max_world_size=None,
    join=join_placed,
    secondary_error=TORCH_DDP.secondary_error,
    shared_model=SharedModel(axes=("fsdp",), rank_state=rank_state_when_placed, is_for_large_models=True),
)
TENSOR_PARALLEL = replace(
    TORCH_FSDP,
    shared_model=SharedModel(
        axes=("tensor",),
        rank_state=rank_state_when_placed,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
HYBRID = replace(
    TORCH_FSDP,
    shared_model=SharedModel(
        axes=("fsdp", "tensor"),
        rank_state=rank_state_when_placed,
        check_learner=check_layers_of,
        is_for_large_models=True,
    ),
)
