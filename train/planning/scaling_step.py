"""The duration of a step for any number of ranks: computation, the exchanges of a strategy, and what hides them.

Not in the model: ranks of different speed, reading, and checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from train.contracts.mesh_shape import AXES_OF_LAYERS, MeshShape
from train.strategies import axes_of, exchanges_of
from train.strategies.exchanges import Assumed, Work, sums_gradients


@dataclass(frozen=True, slots=True)
class Step:
    """A predicted step."""

    mesh: MeshShape
    seconds: float
    compute_seconds: float
    exchange_seconds: float
    """All exchanges, hidden or not."""
    bubble_seconds: float
    images: int
    """Of the global batch."""

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    def efficiency(self, alone: Work) -> float:
        """Images a second of a rank, divided by those of one rank alone."""
        return self.images_per_second / self.mesh.num_ranks / (alone.local_batch_size / alone.step_seconds)


def predict(strategy: str, work: Work, mesh: MeshShape, assumed: Assumed) -> Step:
    """`mesh`: with axes that the strategy has; the local batch of a rank that reads rows of its own stays the same.

    A strategy whose exchanges are not known counts as one that adds up gradients.
    """
    exchanged = (exchanges_of(strategy) or sums_gradients)(work, mesh, assumed)
    computing = work.step_seconds / mesh.tensor / mesh.pipeline
    idle = computing * exchanged.idle_share / (1 - exchanged.idle_share)
    unhidden = max(0.0, exchanged.hideable - assumed.overlap * computing)
    seconds = computing + idle + exchanged.exposed + unhidden
    if mesh.num_servers:
        # All workers pass the servers' links; each step is one worker's, of a whole batch.
        busy = mesh.num_ranks * 2 * work.gradient_bytes / mesh.num_servers
        seconds = max(seconds, busy / assumed.network.between_hosts.bytes_per_second)
    images = work.local_batch_size * mesh.data_size
    return Step(mesh, seconds, computing, exchanged.hideable + exchanged.exposed, idle, images)


@dataclass(frozen=True, slots=True)
class Published:
    """A measurement from the literature."""

    name: str
    num_ranks: int
    efficiency: float
    source: str
    kind: Literal["of one", "of 8"] = "of one"
    """Compared with one GPU, or with eight."""


PUBLISHED = (
    Published("ResNet-50, 8 V100", 8, 0.87, "NVIDIA DeepLearningExamples, PyTorch ResNet-50: 6.93 times one GPU (AMP)"),
    Published("Inception V3 and ResNet-101, 512 P100", 512, 0.90, "Horovod, arXiv:1802.05799 and its benchmarks page"),
    Published("VGG-16, 512 P100", 512, 0.68, "Horovod, arXiv:1802.05799 and its benchmarks page"),
    Published("ResNet-50, 256 P100", 256, 0.90, "Goyal et al., arXiv:1706.02677", kind="of 8"),
)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10_000)
"""Numbers of ranks of a curve."""


def undivided_axis(strategy: str, mesh: MeshShape) -> str:
    """The axis along which the strategy's ranks divide layers, if it has one rank; else empty."""
    return next((axis for axis in axes_of(strategy) if axis in AXES_OF_LAYERS and mesh.sizes[axis] == 1), "")


def mesh_for(strategy: str, num_ranks: int, asked: MeshShape) -> MeshShape | None:
    """The mesh of so many ranks. `asked`: axes of layers keep their sizes, and so do shards if there are several copies
    of them (`asked.fsdp` > 1); None if they do not divide."""
    axes = axes_of(strategy)
    sizes = {axis: asked.sizes[axis] for axis in AXES_OF_LAYERS if axis in axes}
    rest, odd = divmod(num_ranks, math.prod(sizes.values()))
    if odd:
        return None
    if "fsdp" in axes:
        sizes["fsdp"] = asked.fsdp if asked.fsdp > 1 else rest
        if rest % sizes["fsdp"]:
            return None
    return MeshShape(**sizes, data=rest // sizes.get("fsdp", 1), num_servers=asked.num_servers)
