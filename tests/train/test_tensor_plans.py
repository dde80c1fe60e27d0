"""Plans of tensor parallelism: the parts that ranks hold compute what the whole does, here one after the other."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from shardmill.errors import UsageError
from train.models import MODELS
from train.models.tensor_plans import check_heads, heads_of, tensor_plan

OURS = {
    "attention.query": "column", "attention.key": "column", "attention.value": "column", "attention.out": "row",
    "fc1": "column", "fc2": "row",
}  # fmt: skip
OF_TORCHVISION = {
    "self_attention.query": "column", "self_attention.key": "column", "self_attention.value": "column",
    "self_attention.out": "row", "mlp.0": "column", "mlp.3": "row",
}  # fmt: skip


def vit_of_torchvision(shape_HWC=(32, 32, 3)):
    """Narrow and flat; its head, which is zero, made to let something through."""
    import torch
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    model = VisionTransformer(shape_HWC[0], 8, 2, 6, 48, 96, num_classes=5)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def part_of(layers, plan, rank: int, num_ranks: int):
    """A copy of a module as `rank` holds it; the bias of a row is added once, by rank 0."""
    import torch

    part = copy.deepcopy(layers)
    for name, split in plan.items():
        layer = part.get_submodule(name)
        axis = 1 if split == "row" else 0
        layer.weight = torch.nn.Parameter(layer.weight.chunk(num_ranks, axis)[rank])
        if split != "row":
            layer.bias = torch.nn.Parameter(layer.bias.chunk(num_ranks)[rank])
        elif rank:
            layer.bias = None
    return part


def test_the_plan_of_a_vision_transformer_names_every_linear_layer_of_its_blocks():
    from train.models.split_attention import split_attention

    model = MODELS["vit_tiny"]((32, 32, 3), 5)
    assert tensor_plan(model) == {
        f"blocks.{block}.{name}": split for block in range(12) for name, split in OURS.items()
    }
    theirs = tensor_plan(split_attention(vit_of_torchvision()))
    assert theirs == {
        f"encoder.layers.encoder_layer_{block}.{name}": split
        for block in range(2)
        for name, split in OF_TORCHVISION.items()
    }
    assert heads_of(model) == {3} and heads_of(split_attention(vit_of_torchvision())) == {6}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_of_attention_and_mlp_add_up_to_the_whole(num_ranks):
    import torch

    torch.manual_seed(0)
    block = MODELS["vit_small"]((32, 32, 3), 5).blocks[0]
    tokens_NPE, plan = torch.randn(2, 9, 384), tensor_plan(block)
    assert plan == OURS
    parts = [part_of(block, plan, rank, num_ranks) for rank in range(num_ranks)]
    for whole, partial in (
        (block.attention(tokens_NPE), [part.attention(tokens_NPE) for part in parts]),
        (
            block.fc2(torch.nn.functional.gelu(block.fc1(tokens_NPE))),
            [part.fc2(torch.nn.functional.gelu(part.fc1(tokens_NPE))) for part in parts],
        ),
    ):
        np.testing.assert_allclose(sum(partial).detach(), whole.detach(), atol=2e-6)


def test_attention_of_torchvision_that_is_taken_apart_computes_the_same():
    import torch

    from train.models.split_attention import SplitAttention, split_attention

    whole = vit_of_torchvision()
    drawn_after = torch.get_rng_state()
    split = split_attention(copy.deepcopy(whole))
    assert torch.equal(torch.get_rng_state(), drawn_after)
    assert sum(isinstance(each, SplitAttention) for each in split.modules()) == 2
    assert sum(each.numel() for each in split.parameters()) == sum(each.numel() for each in whole.parameters())
    images_NCHW = torch.randn(3, 3, 32, 32)
    for is_training in (False, True):
        wanted, found = whole.train(is_training)(images_NCHW), split.train(is_training)(images_NCHW)
        np.testing.assert_allclose(found.detach(), wanted.detach(), atol=1e-6, rtol=1e-6)
    wanted.square().sum().backward()
    found.square().sum().backward()
    for one, other in zip(split.encoder.layers, whole.encoder.layers, strict=True):
        joined = torch.cat([getattr(one.self_attention, name).weight.grad for name in ("query", "key", "value")])
        np.testing.assert_allclose(joined, other.self_attention.in_proj_weight.grad, rtol=1e-4, atol=1e-5)


def test_attention_that_drops_weights_out_stays_whole():
    from torchvision.models import VisionTransformer

    from train.models.split_attention import split_attention

    model = split_attention(VisionTransformer(32, 8, 1, 2, 16, 32, attention_dropout=0.1))
    plan = tensor_plan(model)
    assert plan == {f"encoder.layers.encoder_layer_0.mlp.{name}": how for name, how in (("0", "column"), ("3", "row"))}
    assert not heads_of(model)


@pytest.mark.parametrize(("name", "layer"), [("resnet18", "fc"), ("mobilenet_v3_small", "classifier.3")])
def test_of_a_convolutional_network_the_classifier_alone_is_divided(name, layer):
    model = MODELS[f"torchvision.models:{name}"]((32, 32, 1), 5)
    assert tensor_plan(model) == {f"model.{layer}": "column_gathered"}


def test_a_module_without_a_linear_layer_has_no_plan():
    from torch import nn

    with pytest.raises(
        UsageError, match="a Conv2d has no linear layer that ranks could divide; expected a vision tran"
    ):
        tensor_plan(nn.Conv2d(3, 5, 1))


def test_heads_that_ranks_do_not_divide_are_refused_with_the_sizes_that_fit():
    for num_ranks in (1, 2, 3, 4, 6, 12):
        check_heads("vit_base", {12}, num_ranks, 12, is_set=False)
    check_heads("torchvision.models:resnet18", set(), 5, 5, is_set=False)
    wanted = (
        "train.model = 'vit_base' has attention with 12 heads, and 5 ranks divide each layer; "
        "expected a number of ranks that divides 12; set train.num_workers to a multiple of 2 or 3 or 4 or 6 or 12"
    )
    with pytest.raises(UsageError, match=wanted):
        check_heads("vit_base", {12}, 5, 5, is_set=False)
    # With a size that is set, another number of workers alone would only be refused by the mesh.
    wanted = "divides 4; set train.mesh.tensor to 2 or 4, and train.num_workers to a multiple of it"
    with pytest.raises(UsageError, match=wanted):
        check_heads("vit_tiny", {4}, 3, 3, is_set=True)
    with pytest.raises(
        UsageError, match="with 8 and 12 heads, and 8 ranks .* divides 4; set train.mesh.tensor to 2 or 4"
    ):
        check_heads("mine", {12, 8}, 8, 8, is_set=True)
    with pytest.raises(UsageError, match="divides 1; choose another strategy"):
        check_heads("mine", {3, 4}, 2, 2, is_set=False)
