"""Sums over ranks of tensors that each of them holds: one exchange, in place."""

from __future__ import annotations

from typing import Any


def sum_in_place(tensors: list[Any], group: Any) -> None:
    """All of them at a time, over the ranks of a process group."""
    import torch
    import torch.distributed as dist

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.reshape(tensor.shape))


def sum_over_all(tensor: Any) -> None:
    """Over the ranks of the world."""
    import torch.distributed as dist

    dist.all_reduce(tensor)
