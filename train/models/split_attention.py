"""Takes torchvision's fused attention apart: query, key and value are one matrix, which cannot be split by heads.

Only ranks that divide it do so. Everyone else sees the model as torchvision builds it: `rows_of` says which rows of its
weights the taken-apart ones are.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from train.models.vit_torch import Attention

LAYERS, KINDS = ("query", "key", "value"), ("weight", "bias")


class SplitAttention(Attention):
    """An `nn.MultiheadAttention` over one sequence, with a layer each for query, key and value; called like it."""

    rows_of: ClassVar = {
        **{f"{layer}.{kind}": (f"in_proj_{kind}", index) for index, layer in enumerate(LAYERS) for kind in KINDS},
        **{f"out.{kind}": (f"out_proj.{kind}", 0) for kind in KINDS},
    }
    """Its parameters -> those of the attention that it replaces (train/backends/torch/boxes.py)."""

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
