"""Says around each collective operation what this rank does, so that the driver can tell who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from train.strategies.strategy import Strategy
from train.values import Reporter, World


class AnnouncedCollective:
    """A strategy's collective. Joining the world is the first thing that ranks wait for each other in."""

    def __init__(self, strategy: Strategy, world: World, reporter: Reporter) -> None:
        self._reporter = reporter
        with self._waiting("joining the world"):
            self._collective = strategy.open_collective(world)
        self.rank: int = world.rank
        self.num_ranks: int = world.num_ranks

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        with self._waiting("an allreduce"):
            return self._collective.sum_tensors(tensors)

    def broadcast_variables(self, variables: list[Any]) -> None:
        with self._waiting("a broadcast of variables"):
            self._collective.broadcast_variables(variables)

    def broadcast_bytes(self, data: bytes) -> bytes:
        with self._waiting("a broadcast"):
            return self._collective.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        with self._waiting("a gather"):
            return self._collective.gather_bytes(data)

    def barrier(self) -> None:
        with self._waiting("a barrier"):
            self._collective.barrier()

    def close(self) -> None:
        with self._waiting("leaving the world"):
            self._collective.close()

    @contextmanager
    def _waiting(self, where: str) -> Iterator[None]:
        self._reporter.doing(where, waits=True)
        yield
        self._reporter.doing("its own work")
