"""The strategy of one process: every collective is the identity."""

from __future__ import annotations

from typing import Any

from train.strategies.strategy import Strategy
from train.values import World


class SingleCollective:
    """A world of one rank."""

    rank = 0
    num_ranks = 1

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        return tensors

    def broadcast_variables(self, variables: list[Any]) -> None:
        return

    def broadcast_bytes(self, data: bytes) -> bytes:
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return


def open_single(world: World) -> SingleCollective:
    assert world.num_ranks == 1, world
    return SingleCollective()


SINGLE = Strategy(
    synchronous=True, exact_resume=True, checkpoint_layout="replicated", max_ranks=1, open_collective=open_single
)
