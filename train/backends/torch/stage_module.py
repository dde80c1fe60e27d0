"""One stage of a pipeline as a module; imported where PyTorch is there (train/backends/torch/stages.py).

Tensors that go from rank to rank must be contiguous, also gradients, and must share no memory with what autograd keeps.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from train.backends.torch.passes import Parts
from train.layers.sample_bits import drawing


class _Arrival(torch.autograd.Function):
    """What came from another rank, as it is; its gradient goes back contiguous."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


class _Departure(torch.autograd.Function):
    """A contiguous copy, no view of anything: PyTorch detaches it in place later on."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


class StageModule(nn.Module):
    """What a rank computes between two borders: uint8 images_NHWC, or what came from the stage before it -> float32
    outputs_NK, or what the stage behind it gets."""

    def __init__(self, blocks: tuple[nn.Module, ...], parts: Parts, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self._is_first, self._is_last = is_first, is_last
        # No module of its own: only a part of what it has is this stage's.
        self._parts = (parts,)
        self._calls = tuple(parts.recomputed.chain(blocks))

    def forward(self, values: torch.Tensor, keys_N: torch.Tensor | None = None) -> torch.Tensor:
        """`keys_N`: of the samples, if layers draw random numbers for each (train/layers/sample_bits.py)."""
        [parts] = self._parts
        draw = nullcontext if keys_N is None else partial(drawing, keys_N)
        with draw(), parts.precision.computing(), parts.recomputed.forward(None, draw):
            values = parts.classifier.inputs_of(values) if self._is_first else _Arrival.apply(values)
            for call in self._calls:
                values = call(values)
        return values.float() if self._is_last else _Departure.apply(values)
