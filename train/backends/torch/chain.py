"""A PyTorch module as a chain of blocks, and where a pipeline cuts it: each stage computes some blocks in a row.

A stage receives one tensor from the stage before it, so a module can be cut if it is an `nn.Sequential`, or has a
method `stages()` that returns the modules which, one after the other, compute what its `forward` computes. Nothing can
skip a border, no weight can be in two stages, and no block may depend on other samples of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import Batch
from shardmill.words import counted
from train.backends.torch.runtime import device, import_torch

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner
    from train.backends.torch.passes import Parts
    from train.config import TrainConfig


def changing_buffer(parts: Parts, blocks: Sequence[Any], images_NHWC: Any) -> str:
    """Compute the images twice as in training. -> where a buffer changes each time, in words; empty if none does.

    One that the first pass fills, and the second leaves as it is, does not count. Buffers and generators are afterwards
    as they were.
    """
    torch = import_torch()
    places = [
        (number, module, name, buffer)
        for number, block in enumerate(blocks, 1)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if not places:
        return ""
    num_images = len(images_NHWC)
    # Of a batch, dropout reads the sample ids.
    batch = Batch(np.zeros(0, np.uint8), np.zeros(0), np.ones(num_images, np.float32), np.arange(num_images), 0, 0)

    def after_a_pass() -> list[Any]:
        with parts.draws.of(batch), parts.precision.computing():
            values = parts.classifier.inputs_of(images_NHWC)
            for block in blocks:
                values = block(values)
        return [module._buffers[name].clone() for _, module, name, _ in places]

    before = [buffer.clone() for *_, buffer in places]
    parts.classifier.train()
    with torch.no_grad(), torch.random.fork_rng([] if device().type == "cpu" else [device()]):
        first, second = after_a_pass(), after_a_pass()
        for (_, module, name, buffer), values in zip(places, before, strict=True):
            module._buffers[name] = buffer.copy_(values)
    found = (place for place, *both in zip(places, first, second, strict=True) if not torch.equal(*both))
    for number, module, name, _ in found:
        return f"the buffer {name!r} of a {type(module).__name__}, in block {number} of {len(blocks)}"
    return ""


# What a chain and its module compute differs by the rounding of other kernels at most.
TOLERANCE = 1e-4
ANOTHER = "or set train.strategy = 'torch_fsdp', which takes any nn.Module"


@dataclass(frozen=True, slots=True)
class Border:
    """What a stage hands on for each sample."""

    shape: tuple[int, ...]
    dtype: str
    """Its name in PyTorch."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Some blocks in a row."""

    block_indices: tuple[int, ...]
    """In `chain_of`."""
    weights: tuple[str, ...]
    """Names of those that are trained."""
    border: Border
    cost: int
    """Of one sample: floating point operations of matrices and convolutions, and elements that its blocks return."""


def stages_of(config: TrainConfig, learner: TorchLearner, num_stages: int) -> tuple[Stage, ...]:
    """Cut the learner's module into stages, so that the most expensive one costs as little as it can.

    Raises UsageError for a module that cannot be cut into so many.
    """
    blocks = chain_of(config, learner.module)
    measured = _measured(config, learner, blocks)
    parts = _divided(config, learner.module, blocks, [each.cost for each in measured], num_stages)
    return tuple(
        Stage(part.block_indices, tuple(sorted(part.weights)), measured[part.block_indices[-1]].border, part.cost)
        for part in parts
    )


def weights_by_stage(config: TrainConfig, module: Any, num_stages: int) -> list[frozenset[str]]:
    """Names of the weights of each stage, cut by numbers of weights: what is near to `stages_of` where the size of
    images is unknown. Raises as it does."""
    blocks = chain_of(config, module)
    costs = [1 + sum(each.numel() for each in block.parameters()) for block in blocks]
    return [part.weights for part in _divided(config, module, blocks, costs, num_stages)]


@dataclass(frozen=True, slots=True)
class _Part:
    block_indices: tuple[int, ...]
    weights: frozenset[str]
    cost: int


def _divided(
    config: TrainConfig, module: Any, blocks: Sequence[Any], costs: Sequence[int], num_stages: int
) -> list[_Part]:
    names = {id(weight): name for name, weight in module.named_parameters() if weight.requires_grad}
    units = _units(blocks, names)
    if num_stages > len(units):
        raise UsageError(
            f"train.model = {config.model!r} is a chain of {len(units)} blocks with weights, and the pipeline has "
            f"{num_stages} stages",
            "expected at least one such block for each stage",
            f"set train.mesh.pipeline so that there are at most {len(units)} stages, or use a deeper model",
        )
    firsts = cut([sum(costs[index] for index in unit) for unit in units], num_stages)
    parts = []
    for first, end in pairwise([*firsts, len(units)]):
        indices = tuple(index for unit in units[first:end] for index in unit)
        weights = {names[id(each)] for index in indices for each in blocks[index].parameters() if id(each) in names}
        parts.append(_Part(indices, frozenset(weights), sum(costs[index] for index in indices)))
    _refuse_shared(config, [part.weights for part in parts])
    # What no block uses stays somewhere, so that a checkpoint has all weights.
    unused = frozenset(names.values()).difference(*(part.weights for part in parts))
    return [*parts[:-1], replace(parts[-1], weights=parts[-1].weights | unused)]


def cut(costs: Sequence[int], num_parts: int) -> list[int]:
    """Where each part begins, if the most expensive of `num_parts` parts in a row costs as little as it can."""
    sums = [0, *accumulate(costs)]
    # Of the first n costs: the cost of the most expensive part, and where parts begin.
    best: list[tuple[float, tuple[int, ...]]] = [(cost, (0,)) for cost in sums]
    for num_before in range(1, num_parts):
        best = [
            min(
                (
                    (max(best[first][0], sums[end] - sums[first]), (*best[first][1], first))
                    for first in range(num_before, end)
                ),
                default=(math.inf, ()),
            )
            for end in range(len(sums))
        ]
    return list(best[-1][1])


def chain_of(config: TrainConfig, module: Any) -> list[Any]:
    """The blocks of a module, which may be on `meta`. Raises UsageError if it is no chain."""
    blocks = links_of(module)
    if not blocks:
        raise UsageError(
            f"train.model = {config.model!r} is a {type(module).__name__}: no nn.Sequential, and without a method "
            "stages()",
            "a stage of a pipeline gets one tensor from the stage before it: nothing may skip from one to another",
            f"return an nn.Sequential, add stages(), which returns what forward() calls in a row, {ANOTHER}",
        )
    _refuse_foreign(config, module, blocks)
    _refuse_batch_norms(config, blocks)
    return blocks


def _refuse_foreign(config: TrainConfig, module: Any, blocks: Sequence[Any]) -> None:
    own = {id(each) for each in module.parameters()}
    foreign = [type(block).__name__ for block in blocks for each in block.parameters() if id(each) not in own]
    if foreign:
        raise UsageError(
            f"train.model = {config.model!r}: stages() returns a {foreign[0]} with weights that the model has not",
            "expected the model's own modules, or ones without weights",
            "create it in __init__, as an attribute of the model",
        )


def _refuse_batch_norms(config: TrainConfig, blocks: Sequence[Any]) -> None:
    from torch.nn.modules.batchnorm import _NormBase

    found = [
        f"{type(each).__name__} in block {number} of {len(blocks)}"
        for number, block in enumerate(blocks, 1)
        for each in block.modules()
        if isinstance(each, _NormBase) and (each.track_running_stats or "BatchNorm" in type(each).__name__)
    ]
    if found:
        raise UsageError(
            f"train.model = {config.model!r} has {counted(len(found), 'norm')} over the batch ({found[0]})",
            "a pipeline computes microbatches one after the other: a batch norm would have the moments of one, and "
            "only one rank its moving statistics",
            f"use nn.GroupNorm or nn.LayerNorm, {ANOTHER}",
        )


def tried_images(shape_HWC: tuple[int, int, int]) -> np.ndarray:
    """Two images_NHWC. Not black: what is added to nothing would not be missed."""
    shape = (2, *shape_HWC)
    return (np.arange(math.prod(shape)) % 251).astype(np.uint8).reshape(shape)


@dataclass(frozen=True, slots=True)
class _Measured:
    border: Border
    cost: int


def _measured(config: TrainConfig, learner: TorchLearner, blocks: Sequence[Any]) -> list[_Measured]:
    """Compute two images block by block.

    Raises UsageError if that gives anything but what the module gives, or a border is no tensor.
    """
    from torch.utils.flop_counter import FlopCounterMode

    torch, parts = import_torch(), learner.parts
    images_NHWC = torch.from_numpy(tried_images(parts.image_shape_HWC)).to(device())
    parts.classifier.eval()
    measured = []
    with torch.no_grad(), parts.precision.computing():
        expected = parts.classifier(images_NHWC)
        values = parts.classifier.inputs_of(images_NHWC)
        for number, block in enumerate(blocks, 1):
            with FlopCounterMode(display=False) as counter:
                values = block(values)
            if not isinstance(values, torch.Tensor) or values.dim() == 0 or len(values) != len(images_NHWC):
                raise UsageError(
                    f"train.model = {config.model!r}: block {number} of {len(blocks)}, a {type(block).__name__}, "
                    f"returns {_described(values)} for {len(images_NHWC)} images",
                    "expected one tensor whose first axis is the batch: it may go to another rank",
                    f"join what it returns, {ANOTHER}",
                )
            border = Border(tuple(values.shape[1:]), str(values.dtype).removeprefix("torch."))
            measured.append(_Measured(border, (counter.get_total_flops() + values.numel()) // len(images_NHWC)))
    difference = (values.float() - expected).abs().max() if values.shape == expected.shape else math.inf
    if not difference <= TOLERANCE * (1 + expected.abs().max()):
        raise UsageError(
            f"train.model = {config.model!r}: what stages() returns computes outputs that differ by "
            f"{float(difference):.3g} from those of forward()",
            "expected the modules that forward() calls, in a row and without skips between them",
            f"correct stages(), {ANOTHER}",
        )
    if buffer := changing_buffer(parts, blocks, images_NHWC):
        raise UsageError(
            f"train.model = {config.model!r}: {buffer}, changes in training",
            "a pipeline computes microbatches in turn, and one rank alone would have the buffer as it is",
            f"keep no running state in forward(), {ANOTHER}",
        )
    return measured


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")


def _units(blocks: Sequence[Any], names: dict[int, str]) -> list[list[int]]:
    """Indices of blocks that stay together: each unit has one block with weights to train, so that no rank is without;
    activations and pooling stay with what they are computed from."""
    units: list[list[int]] = [[]]
    num_with_weights = 0
    for index, block in enumerate(blocks):
        if any(id(each) in names for each in block.parameters()):
            num_with_weights += 1
            if num_with_weights > 1:
                units.append([])
        units[-1].append(index)
    return units


def _refuse_shared(config: TrainConfig, weights_of_stages: Sequence[frozenset[str]]) -> None:
    first_with: dict[str, int] = {}
    for number, weights in enumerate(weights_of_stages):
        for name in sorted(weights):
            if first_with.setdefault(name, number) != number:
                raise UsageError(
                    f"train.model = {config.model!r} uses {name} in stage {first_with[name] + 1} and in stage "
                    f"{number + 1} of {len(weights_of_stages)}",
                    "expected weights of one stage each: only one rank holds them",
                    f"give each its own weights, use fewer stages, {ANOTHER}",
                )


def links_of(module: Any) -> list[Any]:
    """What a module says that it computes in a row; empty if it says nothing."""
    nn = import_torch().nn

    def links(module: Any) -> list[Any]:
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            return [link for child in module.children() for link in links(child)]
        return [module]

    if hasattr(module, "stages"):
        return [link for each in module.stages() for link in links(each)]
    found = links(module)
    return [] if found == [module] else found
