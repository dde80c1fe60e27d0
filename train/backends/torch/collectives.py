"""What PyTorch's collectives cost a step: the seconds in which they block the training thread, and the bytes they move.

Collectives of a sharded model are inside its forward and backward passes, called by FSDP2 and by DTensor. PyTorch has
no hook for them on CPUs, so the two functions that wait are replaced while a step runs; both are cheap beside a
collective. Bytes are the same in every step: one step, the first, is traced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

Wait = tuple[float, float]
"""When the thread began to wait for a collective and when it went on, by `time.perf_counter`."""


@dataclass(slots=True)
class Blocked:
    """The waits of the block that `blocked` surrounds."""

    waits: list[Wait] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(end - begin for begin, end in self.waits)


@contextmanager
def blocked() -> Iterator[Blocked]:
    """Time every wait for a collective in this block, whoever calls it. On a GPU the host does not wait: 0 seconds."""
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    found = Blocked()

    def timed(wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def call(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return wait(*arguments, **named)
            finally:
                found.waits.append((began, time.perf_counter()))

        return call

    work: Any = dist.Work
    places = ((work, "wait"), (functional, "wait_tensor"))
    originals = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, timed(original))
        yield found
    finally:
        for (owner, name), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


@dataclass(slots=True)
class Moved:
    """The collectives of a step of one rank."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    """Kind, and the size of the tensor that is summed (`all_reduce`), gathered (`all_gather`) or summed and divided
    (`reduce_scatter`), whole; of `broadcast` and `send`, what travels."""

    def add(self, kind: str, num_bytes: int) -> None:
        self.calls.append((kind, num_bytes))

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for kind, num_bytes in self.calls:
            found[kind] = found.get(kind, 0) + num_bytes
        return found


@contextmanager
def traced(call: Callable[[str, int], None]) -> Iterator[None]:
    """Call `call(kind, bytes)` before each collective of this block. Slow: every operation passes Python."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Trace(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A DTensor comes apart first: what it calls then is seen here.
            if any(kind is DTensor for kind in types):
                return NotImplemented
            name = getattr(getattr(func, "_overloadpacket", None), "__name__", "")
            if name in _KINDS and func.namespace in ("c10d", "_c10d_functional"):
                kind, size = _KINDS[name]
                call(kind, size(args))
            return func(*args, **(kwargs or {}))

    with Trace():
        yield


def _bytes_of(tensors: Any) -> int:
    """Of a tensor, or of lists of some."""
    if isinstance(tensors, list | tuple):
        return sum(map(_bytes_of, tensors))
    return tensors.numel() * tensors.element_size()


_Size = Callable[[Any], int]
_KINDS: dict[str, tuple[str, _Size]] = {
    "allreduce_": ("all_reduce", lambda args: _bytes_of(args[0])),
    "all_reduce": ("all_reduce", lambda args: _bytes_of(args[0])),
    "all_reduce_": ("all_reduce", lambda args: _bytes_of(args[0])),
    "_allgather_base_": ("all_gather", lambda args: _bytes_of(args[0])),
    "allgather_": ("all_gather", lambda args: _bytes_of(args[0])),
    "all_gather_into_tensor": ("all_gather", lambda args: _bytes_of(args[0]) * args[1]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: _bytes_of(args[1])),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args: _bytes_of(args[0])),
    "broadcast_": ("broadcast", lambda args: _bytes_of(args[0])),
    "send": ("send", lambda args: _bytes_of(args[0])),
}
"""Operation -> kind of collective, and the bytes of a call by its arguments."""
