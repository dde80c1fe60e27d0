"""Takes torchvision's fused attention apart: query, key and value are one matrix, which cannot be split by heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from train.models.vit_torch import Attention


class SplitAttention(Attention):
    """An `nn.MultiheadAttention` over one sequence, with a layer each for query, key and value; called like it."""

    def forward(self, query: Any, key: Any, value: Any, need_weights: bool = False) -> Any:
        assert query is key is value and not need_weights, "only self-attention without weights is taken apart"
        return super().forward(query), None


def split_attention(model: nn.Module) -> nn.Module:
    """`model`, in which the attention of torchvision's `vit_*` is taken apart: same function, other parameters.

    Call it before the optimizer is built. Attention that drops weights out stays whole, and so does that of any other
    model.
    """
    from torchvision.models.vision_transformer import EncoderBlock

    for block in model.modules():
        attention = block.get_submodule("self_attention") if isinstance(block, EncoderBlock) else None
        if isinstance(attention, nn.MultiheadAttention):
            block.set_submodule("self_attention", _split(attention))
    return model


def _split(fused: nn.MultiheadAttention) -> nn.Module:
    if fused.dropout or not fused.batch_first:
        return fused
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
