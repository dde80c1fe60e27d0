"""Which layers of a module tensor parallelism divides among ranks, and how: names only, no tensors are touched."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Literal

from shardmill.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from train.models.vit_torch import Attention

Split = Literal["column", "row", "column_gathered"]
"""How a linear layer is divided. `column`: each rank computes some of its outputs, and keeps them. `row`: each rank has
some of its inputs, and the results are added. `column_gathered`: as `column`, and every rank gets all outputs."""

_ATTENTION: dict[str, Split] = {"query": "column", "key": "column", "value": "column", "out": "row"}
_MLP: dict[str, Split] = {"fc1": "column", "fc2": "row"}
_MLP_OF_TORCHVISION: dict[str, Split] = {"0": "column", "3": "row"}


def tensor_plan(module: nn.Module) -> dict[str, Split]:
    """Name of a linear layer -> how it is divided; all other layers are whole on every rank.

    Of a vision transformer these are attention and MLP of every block; in torchvision's, `split_attention` must have
    taken the attention apart. Of any other module it is the last linear layer alone: a convolution is never divided.
    An attention or MLP with frozen weights stays whole. Raises UsageError for a module without a linear layer.
    """
    plan: dict[str, Split] = {
        f"{path}.{name}".lstrip("."): split
        for path, part in module.named_modules()
        for name, split in _plan_of(part).items()
        if all(each.requires_grad for layer in _plan_of(part) for each in part.get_submodule(layer).parameters())
    }
    return plan or _classifier(module)


def attention_in(module: nn.Module) -> list[Attention]:
    """The attention that `tensor_plan` divides by heads."""
    from train.models.vit_torch import Attention

    attention = [each for each in module.modules() if isinstance(each, Attention)]
    return [each for each in attention if all(weight.requires_grad for weight in each.parameters())]


def heads_of(module: nn.Module) -> frozenset[int]:
    """Its numbers of heads, also of what is yet to be taken apart."""
    from train.models.split_attention import fused_blocks

    attention = [*attention_in(module), *(block.self_attention for block in fused_blocks(module))]
    return frozenset(each.num_heads for each in attention)


def check_heads(model: str, heads: Collection[int], num_ranks: int, num_workers: int, *, is_set: bool) -> None:
    """Raises UsageError unless each of `num_ranks` ranks gets equally many heads; PyTorch would fail in the first step.

    `heads`: numbers of heads of the layers of `train.model`. `num_workers`: all ranks, which the groups that divide
    layers must divide, too. `is_set`: whether `train.mesh.tensor` says how large a group is.
    """
    if not any(number % num_ranks for number in heads):
        return
    common = math.gcd(*heads)
    allowed = [size for size in range(2, common + 1) if common % size == 0]
    here = [size for size in allowed if num_workers % size == 0]
    how = f"set train.mesh.tensor to {_or(here)}" if here else f"set train.num_workers to a multiple of {_or(allowed)}"
    if is_set and not here:
        how = f"set train.mesh.tensor to {_or(allowed)}, and train.num_workers to a multiple of it"
    raise UsageError(
        f"train.model = {model!r} has attention with {' and '.join(map(str, sorted(heads)))} heads, and "
        f"{num_ranks} ranks divide each layer",
        f"expected a number of ranks that divides {common}",
        how if allowed else "choose another strategy, such as 'torch_fsdp'",
    )


def _or(sizes: Collection[int]) -> str:
    return " or ".join(map(str, sizes))


def _plan_of(part: Any) -> dict[str, Split]:
    """Of the layers that belong to `part` itself."""
    from train.models.split_attention import is_torchvisions
    from train.models.vit_torch import Attention, Block

    if isinstance(part, Attention):
        return _ATTENTION
    if isinstance(part, Block):
        return _MLP
    return _MLP_OF_TORCHVISION if is_torchvisions(part, "MLPBlock") else {}


def _classifier(module: nn.Module) -> dict[str, Split]:
    from torch import nn

    linear = [(name, each) for name, each in module.named_modules() if isinstance(each, nn.Linear) and name]
    names = [name for name, each in linear if all(weight.requires_grad for weight in each.parameters())]
    if not names:
        raise UsageError(
            f"a {type(module).__name__} has no linear layer that ranks could divide",
            "expected a vision transformer, or a classifier that ends in an nn.Linear",
            "choose another strategy, or another model",
        )
    return {names[-1]: "column_gathered"}
