"""Batches as PyTorch tensors, and on a device while the loop still computes on earlier ones."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shardmill.errors import UsageError
from shardmill.loader.annotations import BatchBoxes
from shardmill.loader.batch import BatchDevice, InMemory, LoaderBatch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import numpy as np

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


def batch_device(device: Any) -> BatchDevice:
    """For a `torch.device`, its name or its number; None for the memory of this process.

    Raises UsageError if there is no such device here.
    """
    import torch

    if device is None:
        return InMemory()
    try:
        # Only a tensor shows whether the device is there. With the number of this thread's device, for in the reader's
        # threads "cuda" would be the first one.
        found = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise UsageError(
            f"device = {str(device)!r}: {str(error).splitlines()[0][:160]}",
            f"expected one that is here: {', '.join(_devices())}",
            "name one of them, or leave device out for tensors of the CPU",
        ) from None
    # Both with streams: those of the CPU do nothing.
    return OnStream(found) if found.type in ("cuda", "cpu") else Blocking(found)


def _devices() -> list[str]:
    import torch

    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *(f"cuda:{number}" for number in range(torch.cuda.device_count())), *mps]


class InFlight:
    """Batches whose copies still read their memory, so that no other batch is decoded into it. Safe for threads."""

    def __init__(self) -> None:
        self._held: collections.deque[tuple[object, Callable[[], bool]]] = collections.deque()
        self._lock = threading.Lock()

    def hold(self, batch: object, is_copied: Callable[[], bool]) -> None:
        """Hold a batch until `release` finds that it is copied."""
        with self._lock:
            self._held.append((batch, is_copied))

    def release(self) -> None:
        """Let go of the batches that are copied by now. Copies of one stream end in their order."""
        with self._lock:
            while self._held and self._held[0][1]():
                self._held.popleft()


@dataclass(frozen=True, slots=True)
class Moving:
    """A batch on its way to the device."""

    batch: LoaderBatch
    copied: Any
    """The event behind its copy."""


class OnStream(BatchDevice):
    """Copies on a stream of its own, from pinned memory: the loop's computation goes on meanwhile."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._is_cuda = device.type == "cuda"
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device) if self._is_cuda else self._module.Stream()
        self._in_flight = InFlight()

    def allocate(self, shape: tuple[int, ...]) -> np.ndarray:
        """For CUDA pinned memory: its copy engine reads it without another copy, and without waiting for the CPU."""
        import torch

        if not self._is_cuda:
            return super().allocate(shape)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()

    def put(self, batch: LoaderBatch) -> Moving:
        """Begin the copy of a batch; its memory is held until the copy has ended."""
        self._in_flight.release()
        with self._module.stream(self._stream):
            moved = batch.to(self._device, non_blocking=True)
            copied = self._module.Event()
            copied.record(self._stream)
        self._in_flight.hold(batch, copied.query)
        return Moving(moved, copied)

    def take(self, put: Moving) -> LoaderBatch:
        """The batch, for the loop's stream: that stream waits for the copy, and this thread does not."""
        self._in_flight.release()
        stream = self._module.current_stream(self._device)
        stream.wait_event(put.copied)
        if self._is_cuda:
            # Its memory on the device belongs to the stream of the copies, which must not reuse it before the loop's
            # stream has come to the end of what it computes with it.
            for values in put.batch.values():
                if hasattr(values, "record_stream"):
                    values.record_stream(stream)
        return put.batch


class Blocking(BatchDevice):
    """Copies in the reader's threads, each of which waits for the end of its copy: for devices of other makers."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def put(self, batch: LoaderBatch) -> LoaderBatch:
        """The batch on the device."""
        return batch.to(self._device)

    def take(self, put: LoaderBatch) -> LoaderBatch:
        """The batch as it is."""
        return put
