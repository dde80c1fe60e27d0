"""What collectives cost on a network: the alpha-beta model, as plain functions.

A message of n bytes takes `latency + n / bandwidth` seconds (Hockney, 1994); a collective is a number of such messages
in a row. Formulas: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA
19(1), 2005 (recursive doubling, and Rabenseifner's halving and doubling); Patarasuk and Yuan, JPDC 69(2), 2009 (the
ring of Horovod, arXiv:1802.05799, and of NCCL); Goyal et al., arXiv:1706.02677, section 4 (first within a host, then
between hosts). What strategies exchange: train/strategies/exchanges.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """The way between two ranks."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, num_messages: float, num_bytes: float) -> float:
        """Of so many messages in a row, `num_bytes` in all."""
        return num_messages * self.latency_seconds + num_bytes / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Network:
    """Hosts with equally many ranks each, the neighbours of the mesh on the same one."""

    between_hosts: Link
    """Of one host; its ranks share it."""
    within_host: Link
    ranks_per_host: int = 1

    def group(self, num_ranks: int, stride: int = 1) -> Group:
        """Ranks r, r + stride, r + 2 stride, ...: an axis of a mesh whose inner axes have `stride` ranks together."""
        here = max(1, min(num_ranks, self.ranks_per_host // stride))
        num_hosts = -(-num_ranks // here)
        # Other groups of the same axis leave the host at the same time.
        sharing = max(1, min(stride, self.ranks_per_host))
        slow = Link(self.between_hosts.latency_seconds, self.between_hosts.bytes_per_second / sharing)
        return Group(num_ranks, here, self.within_host, slow if num_hosts > 1 else self.within_host)


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks of one collective."""

    num_ranks: int
    ranks_per_host: int
    within_host: Link
    slowest: Link
    """Between two neighbours of different hosts, if there are several."""


def ring_allreduce(group: Group, num_bytes: float) -> float:
    """Reduce-scatter, then all-gather, each in N - 1 messages of n/N bytes: least bytes, most messages."""
    ranks = group.num_ranks
    return group.slowest.seconds(2 * (ranks - 1), 2 * (ranks - 1) / ranks * num_bytes)


def tree_allreduce(group: Group, num_bytes: float) -> float:
    """Recursive doubling: log2 N messages of all bytes each. Best for a few bytes."""
    rounds = math.ceil(math.log2(group.num_ranks))
    return group.slowest.seconds(rounds, rounds * num_bytes)


def halving_allreduce(group: Group, num_bytes: float) -> float:
    """Rabenseifner's: bytes of a ring in 2 log2 N messages."""
    ranks = group.num_ranks
    return group.slowest.seconds(2 * math.ceil(math.log2(ranks)), 2 * (ranks - 1) / ranks * num_bytes)


def hierarchical_allreduce(group: Group, num_bytes: float) -> float:
    """Reduce-scatter in each host, a ring between hosts for the n/L bytes of each of its L ranks, which share the
    host's link, then all-gather in each host."""
    here, num_hosts = group.ranks_per_host, -(-group.num_ranks // group.ranks_per_host)
    within = 2 * group.within_host.seconds(here - 1, (here - 1) / here * num_bytes)
    if num_hosts == 1:
        return within
    return within + group.slowest.seconds(2 * (num_hosts - 1), 2 * (num_hosts - 1) / num_hosts * num_bytes)


def all_gather(group: Group, num_bytes: float) -> float:
    """Of n bytes, of which each rank has n/N, around a ring."""
    ranks = group.num_ranks
    return group.slowest.seconds(ranks - 1, (ranks - 1) / ranks * num_bytes)


def reduce_scatter(group: Group, num_bytes: float) -> float:
    """The same way back."""
    return all_gather(group, num_bytes)


Collective = Callable[[Group, float], float]
"""(ranks, bytes of the whole tensor) -> seconds."""

ALLREDUCES: dict[str, Collective] = {
    "ring": ring_allreduce,
    "tree": tree_allreduce,
    "halving": halving_allreduce,
    "hierarchical": hierarchical_allreduce,
}


def fastest_allreduce(group: Group, num_bytes: float) -> tuple[float, str]:
    """-> seconds, name of the algorithm."""
    return min((algorithm(group, num_bytes), name) for name, algorithm in ALLREDUCES.items())
