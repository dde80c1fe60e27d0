"""Exchanges weights between silos as numbered files in the models' store. Rank 0 ends each round without lost silos.

<training dir>/silos/<attempt>/00000012/
    begun-00003         silo 3 works on its part of round 12
    silo-00003.npz      its weights
    mean.npz            rank 0's: the mean weights of those that came in time; only the newest stay
    told                rank 0's last file of this number: what it told all silos
<training dir>/silos/<attempt>/back/back-00003      silo 3 was away and catches up: the running round waits for it

Collectives of Horovod and Gloo end with the first peer that is lost, so weights do not travel by them. The driver would
have to hold the weights of all silos at once; the store is there anyway, holds what a silo missed until it comes back,
and needs no connection between silos. Every silo goes through the same numbers in the same order, rank 0 ahead of them.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from shardmill.stores import open_store
from train.checkpoints.state import dump_arrays, load_arrays
from train.contracts.activities import Activity, during, waiting
from train.contracts.values import Reporter
from train.contracts.world import World

POLL_SECONDS = 0.05
# Older means are deleted; a silo that is further behind continues with the next one that exists.
MEANS_KEPT = 3
BACK = "back/back-"
# Through a store that may have to repeat its requests.
EXCHANGING = Activity("exchanging weights with the other silos")

Arrays = list[np.ndarray]
"""The file of a silo: its figures, then its weights."""


@dataclass(frozen=True, slots=True)
class Round:
    """The result of a round."""

    figures: np.ndarray
    """Their sum over the silos that took part."""
    weights: Arrays
    """The mean; empty if this silo is so far behind that the mean has been deleted."""


class SiloMailbox:
    """`train.strategies.collective.Collective` of silos. All values except weights are those of rank 0."""

    def __init__(self, world: World, timeout_seconds: float, reporter: Reporter) -> None:
        self._store = open_store(world.files_uri)
        self._rank, self._world_size = world.rank, world.world_size
        self._timeout_seconds = timeout_seconds
        self._reporter = reporter
        if world.rank == 0:
            # Files of killed attempts.
            for file in list(self._store.list("")):
                self._store.delete(file.path)
        [of_rank_0, *_] = world.exchange(secrets.token_hex(4).encode())
        self._folder = of_rank_0.decode()
        self._number = -1
        self._present = set(range(1, self._world_size))

    def average(self, compute: Callable[[], Arrays]) -> Round:
        """One round. `compute` gives the silo's figures, of which the first is its number of samples, and weights.

        It is not called if the round is over already: this silo was away.
        """
        with during(self._reporter, EXCHANGING) as step:
            return self._average(partial(self._computed, step, compute))

    def _computed(self, step: Activity, compute: Callable[[], Arrays]) -> Arrays:
        with during(self._reporter, step):
            return compute()

    def _average(self, compute: Callable[[], Arrays]) -> Round:
        self._number += 1
        if self._rank == 0:
            contributions = {0: compute()}
            contributions |= self._collect(contributions[0])
            figures, mean = mean_of([contributions[rank] for rank in sorted(contributions)])
            self._store.put(self._path("mean.npz"), dump_arrays(mean))
            self._store.put(self._path("told"), dump_arrays([figures]))
            self._forget_old_means()
            return Round(figures, mean)
        if self._store.stat(self._path("told")) is None:
            self._store.put(self._path(f"begun-{self._rank:05d}"), b"begun\n")
            self._store.put(self._path(f"silo-{self._rank:05d}.npz"), dump_arrays(compute()))
        else:
            self._store.put(f"{self._folder}/{BACK}{self._rank:05d}", b"back\n")
        [figures] = load_arrays(self._wait_until_told())
        try:
            return Round(figures, load_arrays(self._store.read(self._path("mean.npz"))))
        except FileNotFoundError:
            return Round(figures, [])

    def sum_tensors(self, tensors: list[object]) -> list[object]:
        raise AssertionError("gradients do not leave a silo")

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        [of_rank_0] = load_arrays(self.broadcast_bytes(dump_arrays([array])))
        return of_rank_0

    def broadcast_bytes(self, data: bytes) -> bytes:
        self._number += 1
        if self._rank:
            return self._wait_until_told()
        self._store.put(self._path("told"), data)
        return data

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [self.broadcast_bytes(data)]

    def barrier(self) -> None:
        """Nobody waits for silos that may be lost."""
        return

    def close(self) -> None:
        """Rank 0 deletes all files when the remaining silos have read the last ones."""
        self._number += 1
        if self._rank:
            self._store.put(self._path(f"bye-{self._rank:05d}"), b"bye\n")
            return
        deadline_seconds = time.monotonic() + self._timeout_seconds
        while self._present - self._arrived("bye-") and time.monotonic() < deadline_seconds:
            self._wait("the other silos' end")
        for file in list(self._store.list(self._folder)):
            self._store.delete(file.path)

    def _collect(self, own: Arrays) -> dict[int, Arrays]:
        """The parts of the silos that took part in the last round, or have begun this one, and are in time."""
        deadline_seconds = time.monotonic() + self._timeout_seconds
        while True:
            arrived = self._arrived("silo-")
            expected = self._present | self._arrived("begun-") | self._ranks_of(BACK)
            if not expected - arrived or time.monotonic() > deadline_seconds:
                break
            self._wait("the other silos' weights")
        parts = {rank: load_arrays(self._store.read(self._path(f"silo-{rank:05d}.npz"))) for rank in arrived}
        parts = {rank: part for rank, part in parts.items() if _fits(part, own)}
        for rank in sorted(self._present ^ parts.keys()):
            name = "silo_back" if rank in parts else "silo_missing"
            self._reporter.event(name, {"silo": rank, "message": self._number, "taking_part": len(parts) + 1})
        for rank in self._ranks_of(BACK):
            self._store.delete(f"{self._folder}/{BACK}{rank:05d}")
        self._present = set(parts)
        return parts

    def _arrived(self, kind: str) -> set[int]:
        return self._ranks_of(f"{self._number:08d}/{kind}")

    def _ranks_of(self, kind: str) -> set[int]:
        """The ranks that have put such a file."""
        folder, _, start = kind.partition("/")
        names = [file.path.rpartition("/")[2] for file in self._store.list(f"{self._folder}/{folder}")]
        return {int(name.removeprefix(start).partition(".")[0]) for name in names if name.startswith(start)}

    def _wait_until_told(self) -> bytes:
        while self._store.stat(self._path("told")) is None:
            self._wait("the coordinator's answer")
        return self._store.read(self._path("told"))

    def _wait(self, what: str) -> None:
        with during(self._reporter, waiting(what)):
            time.sleep(POLL_SECONDS)

    def _path(self, name: str) -> str:
        return f"{self._folder}/{self._number:08d}/{name}"

    def _forget_old_means(self) -> None:
        number = self._number - MEANS_KEPT
        for file in list(self._store.list(f"{self._folder}/{number:08d}")) if number >= 0 else []:
            if not file.path.endswith("/told"):
                self._store.delete(file.path)


def mean_of(parts: Sequence[Arrays]) -> tuple[np.ndarray, Arrays]:
    """(sum of the figures, mean of the weights by number of samples); the first part is rank 0's."""
    figures = np.sum([part[0] for part in parts], axis=0)
    num_samples = figures[0]
    if not num_samples:
        # All silos with remaining samples are absent, so no weights have changed.
        return figures, parts[0][1:]
    means = []
    for place in range(1, len(parts[0])):
        mean = sum(part[place].astype(np.float64) * (part[0][0] / num_samples) for part in parts)
        means.append(np.asarray(mean).astype(parts[0][place].dtype))
    return figures, means


def _fits(part: Arrays, own: Arrays) -> bool:
    """Whether a silo's weights can be averaged with rank 0's: of the same shapes, and finite."""
    shapes = [(each.shape, each.dtype) for each in part]
    return shapes == [(each.shape, each.dtype) for each in own] and all(np.isfinite(each).all() for each in part)
