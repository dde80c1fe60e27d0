"""Batch norms of a PyTorch module, or of a Keras model on PyTorch, over the global batch (`train.sync_batch_norm`).

`torch.nn.SyncBatchNorm` computes on GPUs only, and counts padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from train.api import SumInStep
from train.backends.rules import alone, check_rows, checked, replaced
from train.backends.torch.runtime import import_torch
from train.config import TrainConfig

# What is added up in a forward pass.
MOMENTS = "batch_norm"


def limit_momentum(model: Any, is_keras: bool, largest: float) -> None:
    """Let the moving statistics of a model follow faster. PyTorch's momentum is what Keras's leaves of 1."""
    if is_keras:
        from train.backends.keras.batch_norms import limit_momentum as limit_momentum_of_keras

        limit_momentum_of_keras(model, largest)
        return
    from torch.nn.modules.batchnorm import _BatchNorm

    for module in model.modules():
        # Without a momentum it is the mean of all steps.
        if isinstance(module, _BatchNorm) and module.momentum is not None:
            module.momentum = max(module.momentum, 1.0 - largest)


class BatchNorms:
    """The batch norms of one model; none unless `train.sync_batch_norm` is set."""

    def __init__(self, config: TrainConfig, model: Any, is_keras: bool) -> None:
        self.sum_in_step: SumInStep = alone
        self._weights_N: Any = None
        self._kept: list[Any] | None = None
        self._again: Iterator[Any] | None = None
        self._of_keras = None
        self._modules: tuple[Any, ...] = ()
        if not config.sync_batch_norm:
            return
        if is_keras:
            from train.backends.keras.batch_norms import KerasBatchNorms

            self._of_keras = KerasBatchNorms(model, config.model, self._moments_of_keras)
        else:
            from torch.nn.modules.batchnorm import _BatchNorm

            found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
            self._modules = checked(config.model, found, ("forward",), _BatchNorm)

    @contextmanager
    def synchronized(self, weights_N: Any) -> Iterator[None]:
        """Around the forward pass of a batch."""
        self._weights_N = weights_N
        if self._of_keras is not None:
            with self._of_keras.synchronized():
                yield
        else:
            with replaced("forward", [(module, partial(self._forward, module)) for module in self._modules]):
                yield

    @contextmanager
    def keeping(self, sums: list[Any]) -> Iterator[None]:
        """Around what will be computed twice: `sums` becomes what was added up over ranks."""
        self._kept = sums
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def again(self, sums: list[Any]) -> Iterator[None]:
        """Around its second time, which takes them from `sums`: no rank waits for another a second time."""
        self._again = iter(sums)
        try:
            yield
        finally:
            self._again = None

    def _sum(self, tensor: Any, name: str) -> Any:
        """`SumInStep`."""
        if name != MOMENTS:
            return self.sum_in_step(tensor, name)
        if self._again is not None:
            return next(self._again)
        total = self.sum_in_step(tensor, name)
        if self._kept is not None:
            self._kept.append(total)
        return total

    def _forward(self, module: Any, inputs: Any) -> Any:
        """In place of the module's own: what a batch norm computes (torch/nn/modules/batchnorm.py)."""
        torch = import_torch()
        keeps_statistics = module.running_mean is not None
        if not module.training and keeps_statistics:
            return type(module).forward(module, inputs)
        module._check_input_dim(inputs)
        counts = self._rows_that_count(module, inputs)
        axes = [axis for axis in range(inputs.dim()) if axis != 1]
        mean_C, variance_C, num_C = _moments()(inputs, counts, axes, self._sum)
        if module.training and module.track_running_stats and keeps_statistics:
            with torch.no_grad():
                module.num_batches_tracked.add_(1)
                share = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
                # As PyTorch has it: of the variance the estimate without bias, in the running statistics alone.
                unbiased_C = variance_C * (num_C / (num_C - 1).clamp(min=1))
                module.running_mean.mul_(1 - share).add_(mean_C.to(module.running_mean.dtype), alpha=share)
                module.running_var.mul_(1 - share).add_(unbiased_C.to(module.running_var.dtype), alpha=share)
        scale_C = torch.rsqrt(variance_C + module.eps)
        if module.weight is not None:
            scale_C = scale_C * module.weight
        shift_C = -mean_C * scale_C
        if module.bias is not None:
            shift_C = shift_C + module.bias
        shape = [1, -1, *[1] * (inputs.dim() - 2)]
        # Nothing of the size of the inputs is kept for the backward pass but they themselves.
        return torch.addcmul(shift_C.view(shape), _widened(inputs), scale_C.view(shape)).to(inputs.dtype)

    def _moments_of_keras(self, inputs: Any, mask: Any, layer: Any) -> tuple[Any, Any]:
        counts = self._rows_that_count(layer.path, inputs)
        if mask is not None:
            counts = counts & mask.bool().unsqueeze(-1)
        mean_C, variance_C, _ = _moments()(inputs, counts, layer._reduction_axes, self._sum)
        return mean_C.to(inputs.dtype), variance_C.to(inputs.dtype)

    def _rows_that_count(self, layer: object, inputs: Any) -> Any:
        """Shape (N, 1, ...), with as many axes as the inputs."""
        check_rows(layer, inputs.shape[0], len(self._weights_N))
        return (self._weights_N > 0).view(-1, *[1] * (inputs.dim() - 1))


def _widened(inputs: Any) -> Any:
    torch = import_torch()
    return inputs.to(torch.promote_types(inputs.dtype, torch.float32))


@cache
def _moments() -> Any:
    """(inputs, counts, axes, sum_in_step) -> mean_C, variance_C, and how many numbers each channel has."""
    torch = import_torch()

    class Moments(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, counts: Any, axes: list[int], sum_in_step: SumInStep) -> Any:
            floats = _widened(inputs)
            # Not the tensors themselves: the backward pass would keep them.
            dtype, num_axes = floats.dtype, inputs.dim()

            def per_channel(tensor: Any) -> Any:
                return tensor.sum(axes).double()

            def along_channels(values_C: Any) -> Any:
                return values_C.view([1 if axis in axes else -1 for axis in range(num_axes)]).to(dtype)

            num_C = per_channel(counts.expand(inputs.shape).float())
            sum_C = per_channel(torch.where(counts, floats, 0.0))
            mean_here_C = sum_C / num_C.clamp(min=1)
            deviations = torch.where(counts, floats - along_channels(mean_here_C), 0.0)
            # Around this rank's own mean, in the precision of the inputs; only here is it moved to 0, in float64.
            squares_C = per_channel(deviations.square_()) + sum_C * mean_here_C
            sums = sum_in_step(torch.stack([num_C, sum_C, squares_C]), MOMENTS)
            num_C, mean_C = sums[0], sums[1] / sums[0]
            variance_C = (sums[2] / num_C - mean_C.square()).clamp(min=0)
            ctx.along_channels, ctx.sum_in_step = along_channels, sum_in_step
            ctx.save_for_backward(inputs, counts, num_C, mean_C)
            ctx.mark_non_differentiable(num_C)
            return mean_C.to(floats.dtype), variance_C.to(floats.dtype), num_C.to(floats.dtype)

        @staticmethod
        def backward(ctx: Any, of_mean_C: Any, of_variance_C: Any, _: Any) -> Any:
            inputs, counts, num_C, mean_C = ctx.saved_tensors
            totals = ctx.sum_in_step(torch.stack([of_mean_C, of_variance_C]).double(), "batch_norm_gradient")
            deviations = _widened(inputs) - ctx.along_channels(mean_C)
            of_inputs = ctx.along_channels(totals[0] / num_C) + ctx.along_channels(2 * totals[1] / num_C) * deviations
            return torch.where(counts, of_inputs, 0.0).to(inputs.dtype), None, None, None

    return Moments.apply
