"""Gives ranks that hold a model together the numbers with which it begins: rank 0's, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from train.checkpoints.shards import Shard


def hand_out(numbers: Mapping[str, Any], of_ranks: Sequence[Sequence[Shard]], mine: Sequence[Any], rank: int) -> None:
    """Fill this rank's tensors, `mine`, whose boxes are `of_ranks[rank]`.

    Rank 0, which has the whole arrays, sends each rank one box after the other; `numbers` of other ranks have none.
    """
    import torch
    import torch.distributed as dist

    def receive(tensor: Any) -> None:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.recv(received, 0)
        tensor.copy_(received)

    with torch.no_grad():
        for to, shards in enumerate(of_ranks):
            for place, shard in enumerate(shards):
                if rank not in (0, to) or 0 in shard.shape:
                    continue
                if rank != 0:
                    receive(mine[place])
                    continue
                box = numbers[shard.name].detach()[shard.slices].contiguous()
                if to == 0:
                    mine[place].copy_(box)
                else:
                    dist.send(box, to)
