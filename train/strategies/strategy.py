"""What a strategy declares, the collectives through which ranks exchange data, and the strategy of a single process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from train.values import Reporter, World


class Collective(Protocol):
    """Operations that every rank calls in the same order; each call returns when all ranks have joined it."""

    rank: int
    world_size: int

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Each tensor (all of one dtype) summed over all ranks, in ONE grouped operation.

        Equal bits on every rank and in every run of the same world size.
        """
        ...

    def broadcast_variables(self, variables: list[Any]) -> None:
        """Assign rank 0's values to the Keras variables of every rank."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; what the others pass is ignored."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order, on every rank."""
        ...

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        ...

    def close(self) -> None:
        """Leave the world; no call may follow."""
        ...


@dataclass(frozen=True, slots=True)
class Strategy:
    """How replicas form a world, and what a training under it promises; the shared tests follow what is declared."""

    synchronous: bool
    """All ranks apply the same update at the same step."""
    exact_resume: bool
    """A resumed training at the same world size ends with the same bits as one that never stopped."""
    checkpoint_layout: Literal["replicated"]
    """`replicated`: rank 0 writes weights and optimizer, each rank its own non-trainable state."""
    max_world_size: int | None
    """Largest world size, or None if only `train.num_streams` bounds it."""
    open_collective: Callable[[World], Collective]

    def allows_world_size(self, world_size: int) -> bool:
        return world_size >= 1 and (self.max_world_size is None or world_size <= self.max_world_size)


class AnnouncedCollective:
    """A strategy's collective that reports each operation, so that the driver knows which rank waits for which."""

    def __init__(self, strategy: Strategy, world: World, reporter: Reporter) -> None:
        self._reporter = reporter
        with self._waiting("joining the world"):
            self._collective = strategy.open_collective(world)
        self.rank: int = world.rank
        self.world_size: int = world.world_size

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


class SingleCollective:
    """A world of one rank: every operation is the identity."""

    rank = 0
    world_size = 1

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
    assert world.world_size == 1, world
    return SingleCollective()


SINGLE = Strategy(
    synchronous=True, exact_resume=True, checkpoint_layout="replicated", max_world_size=1, open_collective=open_single
)
