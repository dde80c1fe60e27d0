"""The operations by which ranks exchange data: the protocol, one that announces to the driver, and one for one rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from train.contracts.activities import Activity, Stopwatch, during, waiting
from train.contracts.values import Reporter
from train.contracts.world import World


class Collective(Protocol):
    """Operations that every rank calls in the same order; each call returns when all ranks have joined it."""

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Each tensor of the backend (all of one dtype) summed over all ranks, in ONE grouped operation.

        The last one holds metrics of the step, which are never compressed.

        Equal bits on every rank and in every run of the same world size. A strategy that sums inside a compiled step
        (`AnnouncedSum`) has it traced there: then it returns what the graph will compute.
        """
        ...

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """A NumPy array, summed over all ranks."""
        ...

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; what the others pass is ignored."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order, on every rank. Empty ones are allowed unless all are."""
        ...

    def barrier(self) -> None:
        """Return when every rank has arrived."""
        ...

    def close(self) -> None:
        """Leave the world; no call may follow."""
        ...


class AnnouncedCollective:
    """A collective that reports each operation, so that the driver knows which rank waits for which."""

    def __init__(self, join: Callable[[World], Collective], world: World, reporter: Reporter) -> None:
        self._reporter = reporter
        with during(self._reporter, waiting("joining the world")):
            self._collective = join(world)

    def sum_inside(self) -> AnnouncedSum:
        """Return its `sum_tensors` for a compiled step."""
        return AnnouncedSum(self._collective, self._reporter)

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        with during(self._reporter, waiting("an allreduce")):
            return self._collective.sum_tensors(tensors)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        with during(self._reporter, waiting("an allreduce")):
            return self._collective.sum_array(array)

    def broadcast_bytes(self, data: bytes) -> bytes:
        with during(self._reporter, waiting("a broadcast")):
            return self._collective.broadcast_bytes(data)

    def gather_bytes(self, data: bytes) -> list[bytes]:
        with during(self._reporter, waiting("a gather")):
            return self._collective.gather_bytes(data)

    def barrier(self) -> None:
        with during(self._reporter, waiting("a barrier")):
            self._collective.barrier()

    def close(self) -> None:
        with during(self._reporter, waiting("leaving the world")):
            self._collective.close()


class AnnouncedSum:
    """A collective's sum inside a compiled step, in which the computation reports when it starts and stops waiting.

    `begin` and `end` are called by a thread of the framework, while the one that trains waits for the step.
    """

    def __init__(
        self, collective: Collective, reporter: Reporter, now: Callable[[], float] = time.perf_counter
    ) -> None:
        """`now`: the clock of `seconds`."""
        self.sum_tensors = collective.sum_tensors
        self._reporter = reporter
        self._now = now
        self._stopwatch = Stopwatch(now)
        self._before: Activity | None = None
        self.seconds = 0.0
        """The duration of the last sum."""

    def expect_others(self) -> None:
        """Before a step with other sums in front of this one, which are not announced: until it comes, all may wait."""
        self._before = self._reporter.doing(waiting("an allreduce in its step"))

    def begin(self) -> None:
        before = self._reporter.doing(waiting("an allreduce"))
        self._before = self._before or before
        self._stopwatch = Stopwatch(self._now)

    def end(self) -> None:
        self.seconds = self._stopwatch.lap()
        assert self._before is not None
        self._reporter.doing(self._before)
        self._before = None


class SingleCollective:
    """A world of one rank: every operation is the identity."""

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        return tensors

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        return array

    def broadcast_bytes(self, data: bytes) -> bytes:
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]

    def barrier(self) -> None:
        return

    def close(self) -> None:
        return
