"""Which layers of a module tensor parallelism divides among ranks, and how; imported where PyTorch is there.

The fused attention of torchvision's vision transformers is first taken apart into four linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from shardmill.errors import UsageError
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


LAYERS, KINDS = ("query", "key", "value"), ("weight", "bias")


class SplitAttention(Attention):
    """An `nn.MultiheadAttention` over one sequence, with a layer each for query, key and value; called like it."""

    rows_of: ClassVar = {
        **{f"{layer}.{kind}": (f"in_proj_{kind}", index) for index, layer in enumerate(LAYERS) for kind in KINDS},
        **{f"out.{kind}": (f"out_proj.{kind}", 0) for kind in KINDS},
    }
    """Its parameters -> those of the attention that it replaces (train/backends/torch/layout.py)."""

    def forward(self, query: Any, key: Any, value: Any, need_weights: bool = False) -> Any:
        assert query is key is value and not need_weights, "only self-attention without weights is taken apart"
        return super().forward(query), None


def split_attention(model: nn.Module) -> nn.Module:
    """`model`, in which the attention of torchvision's `vit_*` is taken apart: same function, other parameters.

    Call it before the optimizer is built. Attention that drops weights out stays whole, and so does frozen one and that
    of any other model.
    """
    for block in fused_blocks(model):
        attention = block.self_attention
        if all(each.requires_grad for each in attention.parameters()):
            block.set_submodule("self_attention", _split(attention))
    return model


def fused_blocks(model: nn.Module) -> list[Any]:
    """Blocks of torchvision's `vit_*` whose `self_attention` can be taken apart."""
    found: list[Any] = [each for each in model.modules() if is_torchvisions(each, "EncoderBlock")]
    fused = [each for each in found if isinstance(each.self_attention, nn.MultiheadAttention)]
    return [each for each in fused if not each.self_attention.dropout and each.self_attention.batch_first]


def is_torchvisions(module: Any, name: str) -> bool:
    """Whether a module is of that class of torchvision's vision transformer, also as a subclass that FSDP makes of it.

    Does not import torchvision.
    """
    there = ("torchvision.models.vision_transformer", name)
    return any((kind.__module__, kind.__name__) == there for kind in type(module).__mro__)


def _split(fused: nn.MultiheadAttention) -> nn.Module:
    # Without memory, and above all without a random number: those drawn afterwards stay what they are.
    with torch.device("meta"):
        split = SplitAttention(fused.embed_dim, fused.num_heads)
    assert fused.in_proj_weight is not None and fused.in_proj_bias is not None
    weights, biases = fused.in_proj_weight.chunk(3), fused.in_proj_bias.chunk(3)
    for layer, weight, bias in zip((split.query, split.key, split.value), weights, biases, strict=True):
        layer.weight = nn.Parameter(weight.detach().clone(), fused.in_proj_weight.requires_grad)
        layer.bias = nn.Parameter(bias.detach().clone(), fused.in_proj_bias.requires_grad)
    split.out.weight, split.out.bias = fused.out_proj.weight, fused.out_proj.bias
    return split.train(fused.training)
