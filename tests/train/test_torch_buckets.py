"""Gradients that are summed in buckets are those of the backward pass, whatever of the model it reaches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest

from tests.processes import in_own_process
from train.config import TrainConfig
from train.strategies.torch_ddp import LAST_SENT_BYTES, BucketSums, layout


def test_a_bucket_is_full_or_of_one_weight_and_the_last_that_leaves_is_small():
    """What has no backward pass left to hide behind is at most 1 MiB, unless the first weight alone is more."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    limit_bytes = 2**21
    for _ in range(50):
        kinds_and_bytes = [
            (rng.choice("fd"), rng.choice((4, 90_000, 400_000, 1_200_000, 3_000_000))) for _ in range(40)
        ]
        buckets = layout(kinds_and_bytes, limit_bytes)
        assert sorted(index for indices in buckets for index in indices) == list(range(40))
        assert buckets == sorted(buckets, reverse=True), "the last weights, whose gradients come first, leave first"
        for kind in "fd":
            of_kind = [indices for indices in buckets if kinds_and_bytes[indices[0]][0] == kind]
            limits = [*[limit_bytes] * (len(of_kind) - 1), LAST_SENT_BYTES]
            sizes = [[kinds_and_bytes[index][1] for index in indices] for indices in of_kind]
            assert all({kinds_and_bytes[index][0] for index in indices} == {kind} for indices in of_kind)
            assert all(sum(each) <= limit or len(each) == 1 for each, limit in zip(sizes, limits, strict=True))
            # One more would not have gone in.
            for later, each, limit in zip(sizes, sizes[1:], limits[1:], strict=False):
                assert sum(each) + later[0] > limit


def compared(compression: Literal["none", "bf16"]) -> list[tuple[bool, bool]]:
    """A world of one: for steps of several kinds, whether sums are the plain gradients, and whether all were there."""
    import torch

    from train.contracts.world import World
    from train.strategies.torch_ddp import TorchCollective

    collective = TorchCollective(World())
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
    weights = list(layers.parameters())
    sums = BucketSums(weights, TrainConfig(compression=compression, bucket_bytes=700))
    dtype = torch.float32 if compression == "none" else torch.bfloat16

    def differentiate(parts: Sequence[Sequence[int]], begin: Callable[[], None]) -> list[torch.Tensor]:
        for weight in weights:
            weight.grad = None
        torch.manual_seed(1)
        for part in parts:
            hidden = torch.randn(4, 8, requires_grad=True)
            for number in part:
                hidden = layers[number](hidden).tanh()
            if part is parts[-1]:
                begin()
            hidden.square().sum().backward()
        return [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]

    found = []
    # Which layers each part of the batch goes through.
    for parts in ([range(6)], [[0, 5]], [[0, 1, 5], [3, 5]], [[1, 1, 2]], [[]], [range(6)]):
        for frozen in ((), (0, 3), (4, 5)):
            for number, layer in enumerate(layers):
                layer.requires_grad_(number not in frozen)
            plain = [each.to(dtype).float() for each in differentiate(parts, lambda: None)]
            differentiate(parts, sums.begin)
            found.append((all(map(torch.equal, plain, sums.finish())), all(bool(each.any()) for each in plain)))
    collective.close()
    return found


@pytest.mark.starts("program")
@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_sums_are_the_gradients_of_what_was_reached_and_zero_elsewhere(compression: Literal["none", "bf16"]):
    found = in_own_process("torch", compared, compression)
    assert all(are_equal for are_equal, _ in found), found
    assert {is_whole for _, is_whole in found} == {True, False}


def backward_twice() -> list[str]:
    """A weight's gradient comes from two backward passes inside one; without and with sums inside the backward pass."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from shardmill.errors import TrainingError
    from train.contracts.world import World
    from train.strategies.torch_ddp import TorchCollective

    def summed(sync_batch_norm: bool) -> str:
        layer = torch.nn.Linear(8, 8)
        weights = list(layer.parameters())
        hidden: Any = torch.randn(4, 8, requires_grad=True)
        plain = torch.autograd.grad(layer(layer(hidden)).sum(), weights)
        sums = BucketSums(weights, TrainConfig(bucket_bytes=700, sync_batch_norm=sync_batch_norm))
        sums.begin()
        for _ in range(2):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        try:
            hidden.sum().backward()
        except TrainingError as error:
            return str(error)
        return f"both: {all(map(torch.allclose, plain, sums.finish()))}"

    collective = TorchCollective(World())
    found = [summed(sync_batch_norm=False), summed(sync_batch_norm=True)]
    collective.close()
    return found


@pytest.mark.starts("program")
def test_a_gradient_that_comes_after_its_bucket_has_left_is_an_error():
    """Where batch norms sum during the backward pass no bucket leaves before its end, so none comes too late."""
    as_they_fill, at_the_end = in_own_process("torch", backward_twice)
    assert "(8,) got a gradient twice" in as_they_fill
    assert at_the_end == "both: True"
