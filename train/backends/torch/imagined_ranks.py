"""Stands for one rank of a group that does not exist: what a strategy would place on it can be counted anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imagined_ranks(num_ranks: int) -> Iterator[None]:
    """Inside it this process is rank 0 of so many, by PyTorch's process group `fake`: exchanges return at once, and
    their values mean nothing."""
    import torch.distributed as dist

    # PyTorch has it for its own tests; importing it registers the group.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
