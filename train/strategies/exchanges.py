"""What the ranks of a strategy exchange in a step, as seconds on a network: a strategy names one of these models, or
has one of its own in its file (`Strategy.exchanges`). Plain functions of numbers.

Sources beside those of train/strategies/network.py: gradients that are summed behind the backward pass (Goyal et al.,
arXiv:1706.02677); servers whose links all workers share (Li et al., OSDI 2014).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from train.contracts.mesh_shape import MeshShape
from train.strategies.network import ALLREDUCES, Group, Network, fastest_allreduce


@dataclass(frozen=True, slots=True)
class Work:
    """A step of one rank that has the whole model, alone."""

    step_seconds: float
    local_batch_size: int
    gradient_bytes: float
    """As they travel."""
    weight_bytes: float
    state_bytes: float = 0.0
    """Weights and optimizer."""
    block_bytes: float = 0.0
    """Activations between two blocks, for the local batch."""
    num_blocks: int = 1
    """Parts whose weights are gathered one by one, and whose activations tensor parallelism adds up."""
    num_passes: int = 1
    """Through a pipeline, one after the other: parts of the local batch."""
    num_microbatches: int = 1
    """Of such a pass."""
    schedule: str = "1f1b"
    """Of a pipeline's ranks."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not measured."""

    network: Network
    overlap: float = 0.0
    """Part of the computation beside which gradients and weights can travel: 0 on shared processors, at most about
    2/3 (the backward pass) where another device moves them."""
    allreduce: str = "fastest"

    def group(self, mesh: MeshShape, axis: str) -> Group:
        """The ranks along an axis."""
        return self.network.group(mesh.sizes[axis], mesh.stride(axis))

    def allreduce_seconds(self, mesh: MeshShape, axis: str, num_bytes: float) -> float:
        """Of a sum over the ranks along an axis."""
        if mesh.sizes[axis] == 1:
            return 0.0
        group = self.group(mesh, axis)
        if self.allreduce == "fastest":
            return fastest_allreduce(group, num_bytes)[0]
        return ALLREDUCES[self.allreduce](group, num_bytes)


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds of a step's exchanges."""

    hideable: float = 0.0
    """Of those beside which a rank can compute."""
    exposed: float = 0.0
    """Of those that it waits for."""
    idle_share: float = 0.0
    """Of its time beside these, the part in which it waits for ranks that compute what it needs."""


Exchanges = Callable[[Work, MeshShape, Assumed], Exchanged]
"""(a step of one rank, the mesh, what is assumed) -> the exchanges of a step on this mesh."""


def exchanges_nothing(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """One process."""
    return Exchanged()


def sums_gradients(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """One allreduce of all gradients."""
    return Exchanged(hideable=assumed.allreduce_seconds(mesh, "data", work.gradient_bytes))


def averages_state(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """Weights and optimizer are averaged once a step, which all ranks wait for."""
    return Exchanged(exposed=assumed.allreduce_seconds(mesh, "data", work.state_bytes))


def asks_servers(work: Work, mesh: MeshShape, assumed: Assumed) -> Exchanged:
    """A worker reads all variables, and sends all gradients."""
    return Exchanged(exposed=assumed.network.between_hosts.seconds(2, 2 * work.gradient_bytes))
