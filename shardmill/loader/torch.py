"""Batches as PyTorch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardmill.loader.batch import LoaderBatch
from shardmill.loader.boxes import BatchBoxes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shardmill.values import Batch

Layout = Literal["NCHW", "NHWC"]


def as_tensors(batch: Batch, layout: Layout = "NCHW") -> LoaderBatch:
    """CPU tensors over the memory of the batch: nothing is copied.

    `NCHW` is a view in PyTorch's channels-last memory format, in which its convolutions compute fastest.
    """
    import torch

    images = torch.from_numpy(batch.images_NHWC)
    return LoaderBatch(
        images.permute(0, 3, 1, 2) if layout == "NCHW" else images,
        torch.from_numpy(batch.labels_N),
        torch.from_numpy(batch.weights_N),
        torch.from_numpy(batch.sample_ids_N),
        batch.epoch,
        batch.step,
        {name: _tensors_of(values) for name, values in batch.extra.items()},
    )


def _tensors_of(values: Any) -> Any:
    """Of boxes and masks; other columns stay lists."""
    import torch

    if isinstance(values, BatchBoxes):
        return values.mapped(torch.from_numpy)
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def draws_of(key: int) -> AbstractContextManager[object]:
    """PyTorch's random functions draw from a generator of this key, in this thread alone.

    Seeding the global generator would not do: the loop and the loader's other threads draw from it, too. Functions that
    take no generator, such as dropout, do draw from it.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    tensor = torch.Tensor
    drawing = {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
        *(tensor.uniform_, tensor.normal_, tensor.random_, tensor.bernoulli_, tensor.exponential_, tensor.log_normal_),
        *(tensor.bernoulli, tensor.multinomial, tensor.cauchy_, tensor.geometric_, torch.poisson, torch.binomial),
        # What the distributions Gamma, Beta and Dirichlet call.
        *(getattr(torch, name) for name in ("_standard_gamma", "_sample_dirichlet") if hasattr(torch, name)),
    }
    alike = {torch.rand_like: torch.rand, torch.randn_like: torch.randn, torch.randint_like: torch.randint}
    generator = torch.Generator().manual_seed(key & (1 << 63) - 1)

    class Draws(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if func in alike:
                like, *args = args
                func, kwargs = alike[func], {"size": like.shape, "dtype": like.dtype, **kwargs}
                kwargs.pop("memory_format", None)
                kwargs["generator"] = generator
            elif func in drawing and kwargs.get("generator") is None:
                kwargs["generator"] = generator
            return func(*args, **kwargs)

    return Draws()
