"""Which rank of how many this process is: as it was given, else as the frameworks and launchers say."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from shardmill.errors import UsageError

_VARIABLES = (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"))
"""Of torchrun and Kubernetes' training operator, Open MPI, MPICH."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One rank, and their number."""

    rank: int
    world_size: int


def find_ranks(rank: int | None, world_size: int | None) -> Ranks:
    """`rank` of `world_size`, if they are given; else as PyTorch's process group, Horovod or the environment says.

    A framework counts only if it was imported and initialised: nothing is imported to find out. Raises UsageError if
    one number is given without the other, or they do not belong together.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"rank = {rank} with world_size = {world_size}",
            "expected both, or neither to take them from the environment",
            "give the other one, too",
        )
    found = Ranks(rank, world_size) if rank is not None and world_size is not None else _of_this_process()
    if not 0 <= found.rank < found.world_size:
        raise UsageError(
            f"rank = {found.rank} with world_size = {found.world_size}",
            "expected a rank from 0 to world_size - 1",
            "ranks are counted from 0",
        )
    return found


def _of_this_process() -> Ranks:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    for name in ("horovod.torch", "horovod.tensorflow"):
        horovod = sys.modules.get(name)
        if horovod is not None and horovod.is_initialized():
            return Ranks(horovod.rank(), horovod.size())
    for of_rank, of_size in _VARIABLES:
        if of_rank in os.environ and of_size in os.environ:
            return Ranks(_number(of_rank), _number(of_size))
    return Ranks(0, 1)


def _number(variable: str) -> int:
    value = os.environ[variable]
    if not value.isdecimal():
        raise UsageError(
            f"the environment variable {variable} = {value!r}",
            "expected a number",
            "correct it, or give rank and world_size",
        )
    return int(value)
