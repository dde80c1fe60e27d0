"""The duration of a step for any number of ranks: computation, the exchanges of a strategy, and what hides them.

Sources beside those of train/planning/scaling.py: data parallelism with exchange behind the backward pass (Goyal et
al., arXiv:1706.02677); weights gathered twice and gradients scattered once (ZeRO stage 3, arXiv:1910.02054); two sums
of activations a block and direction (Megatron-LM, arXiv:1909.08053); idle stages (GPipe, arXiv:1811.06965); servers
whose links all workers share (Li et al., OSDI 2014). Not in the model: ranks of different speed, reading, and
checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from train.planning.scaling import (
    ALLREDUCES,
    Network,
    all_gather,
    fastest_allreduce,
    reduce_scatter,
)
from train.strategies.sharded.pipeline_schedules import idle_share_alike, schedule_named


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
class MeshShape:
    """Numbers of ranks along the axes of a mesh, from the outermost to the innermost."""

    pipeline: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    num_servers: int = 0
    """Processes that only hold variables; not counted in `num_ranks`."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size."""
        return {"pipeline": self.pipeline, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is not measured."""

    network: Network
    overlap: float = 0.0
    """Part of the computation beside which gradients and weights can travel: 0 on shared processors, at most about
    2/3 (the backward pass) where another device moves them."""
    allreduce: str = "fastest"


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


Exchanges = Callable[[Work, MeshShape, Assumed], tuple[float, float]]
"""-> seconds of exchanges that computation may hide, and of those that it waits for."""


def predict(strategy: str, work: Work, mesh: MeshShape, assumed: Assumed) -> Step:
    """`mesh`: with axes that the strategy has; the local batch of a rank that reads rows of its own stays the same.

    A strategy that is not ours counts as one that adds up gradients.
    """
    hideable, exposed = EXCHANGES.get(strategy, _gradients)(work, mesh, assumed)
    computing = work.step_seconds / mesh.tensor / mesh.pipeline
    bubble = _idle_share(work, mesh)
    idle = computing * bubble / (1 - bubble)
    seconds = computing + idle + exposed + max(0.0, hideable - assumed.overlap * computing)
    if mesh.num_servers:
        # All workers pass the servers' links; each step is one worker's, of a whole batch.
        busy = mesh.num_ranks * 2 * work.gradient_bytes / mesh.num_servers
        seconds = max(seconds, busy / assumed.network.between_hosts.bytes_per_second)
    images = work.local_batch_size * mesh.data * mesh.fsdp
    return Step(mesh, seconds, computing, hideable + exposed, idle, images)


def _idle_share(work: Work, mesh: MeshShape) -> float:
    """Of the time of a pipeline's ranks, if all stages cost the same."""
    if mesh.pipeline == 1:
        return 0.0
    return _idle_share_of(work.schedule, mesh.pipeline, work.num_microbatches)


@cache
def _idle_share_of(name: str, num_ranks: int, num_microbatches: int) -> float:
    """Many numbers of ranks have pipelines of one length."""
    return idle_share_alike(schedule_named(name, num_ranks), num_ranks, num_microbatches)


def _allreduce(work_bytes: float, num_ranks: int, stride: int, assumed: Assumed) -> float:
    if num_ranks == 1:
        return 0.0
    group = assumed.network.group(num_ranks, stride)
    if assumed.allreduce == "fastest":
        return fastest_allreduce(group, work_bytes)[0]
    return ALLREDUCES[assumed.allreduce](group, work_bytes)


def _nothing(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    return 0.0, 0.0


def _gradients(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """One allreduce of all gradients."""
    return _allreduce(work.gradient_bytes, mesh.data, 1, assumed), 0.0


def _state(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """Weights and optimizer are averaged once a step, which all ranks wait for."""
    return 0.0, _allreduce(work.state_bytes, mesh.data, 1, assumed)


def _servers(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """A worker reads all variables, and sends all gradients."""
    return 0.0, assumed.network.between_hosts.seconds(2, 2 * work.gradient_bytes)


def _sharded_updates(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """The allreduce of data parallelism, then every rank's updated rows."""
    summed, _ = _gradients(work, mesh, assumed)
    if mesh.data == 1:
        return 0.0, 0.0
    return summed, all_gather(assumed.network.group(mesh.data), work.weight_bytes)


def _sharded(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """Weights are gathered block by block, forward and backward; gradients are scattered, then summed over copies."""
    blocks, tensor = work.num_blocks, mesh.tensor
    weights, gradients = work.weight_bytes / tensor / blocks, work.gradient_bytes / tensor / blocks
    seconds = 0.0
    if mesh.fsdp > 1:
        group = assumed.network.group(mesh.fsdp, tensor)
        seconds += blocks * (2 * all_gather(group, weights) + reduce_scatter(group, gradients))
    seconds += blocks * _allreduce(gradients / mesh.fsdp, mesh.data, tensor * mesh.fsdp, assumed)
    return seconds, 0.0


def _divided(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """Activations are summed twice in a block's forward pass, and twice in its backward pass; nothing hides that."""
    exposed = 4 * work.num_blocks * _allreduce(work.block_bytes, mesh.tensor, 1, assumed)
    return _allreduce(work.gradient_bytes / mesh.tensor, mesh.data, mesh.tensor, assumed), exposed


def _hybrid(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    _, exposed = _divided(work, replace(mesh, data=1), assumed)
    return _sharded(work, mesh, assumed)[0], exposed


def _pipelined(work: Work, mesh: MeshShape, assumed: Assumed) -> tuple[float, float]:
    """Activations of a microbatch go to the next stage and their gradients back; each slot of the schedule waits."""
    summed = _allreduce(work.gradient_bytes / mesh.pipeline, mesh.data, mesh.tensor, assumed)
    if mesh.pipeline == 1:
        return summed, 0.0
    link = assumed.network.group(mesh.pipeline, mesh.data * mesh.fsdp * mesh.tensor).slowest
    stages_per_rank = schedule_named(work.schedule, mesh.pipeline).stages_per_rank
    slots = work.num_passes * (work.num_microbatches * stages_per_rank + mesh.pipeline - 1)
    return summed, 2 * slots * link.seconds(1, work.block_bytes / work.num_passes / work.num_microbatches)


EXCHANGES: dict[str, Exchanges] = {
    "single": _nothing,
    "horovod": _gradients,
    "multi_worker_mirrored": _gradients,
    "mirrored": _gradients,
    "torch_ddp": _gradients,
    "parameter_server": _servers,
    "local_sgd": _state,
    "zero1": _sharded_updates,
    "torch_fsdp": _sharded,
    "tensor_parallel": _divided,
    "hybrid": _hybrid,
    "pipeline_parallel": _pipelined,
}


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


DIVIDED_AXES = {"tensor_parallel": "tensor", "hybrid": "tensor", "pipeline_parallel": "pipeline"}
"""The axis along which ranks divide a copy of the model, and read the same rows."""


def undivided_axis(strategy: str, mesh: MeshShape) -> str:
    """The axis that makes the strategy what it is, if it has one rank; else empty."""
    axis = DIVIDED_AXES.get(strategy, "")
    return axis if axis and mesh.sizes[axis] == 1 else ""


def mesh_for(strategy: str, num_ranks: int, asked: MeshShape) -> MeshShape | None:
    """The mesh of so many ranks. `asked`: sizes of its inner axes, which stay the same; None if they do not divide.

    `torch_fsdp` has one group of all ranks unless `asked.fsdp` > 1.
    """
    tensor = asked.tensor if strategy in ("tensor_parallel", "hybrid") else 1
    pipeline = asked.pipeline if strategy == "pipeline_parallel" else 1
    if num_ranks % (tensor * pipeline):
        return None
    rest = num_ranks // tensor // pipeline
    fsdp = 1
    if strategy in ("torch_fsdp", "hybrid"):
        fsdp = asked.fsdp if asked.fsdp > 1 else rest
        if rest % fsdp:
            return None
    servers = asked.num_servers if strategy == "parameter_server" else 0
    return MeshShape(pipeline, rest // fsdp, fsdp, tensor, num_servers=servers)


def curve(strategy: str, work: Work, asked: MeshShape, assumed: Assumed, sizes: Sequence[int] = SIZES) -> list[Step]:
    """The steps of the numbers of ranks that its mesh allows."""
    meshes = [mesh_for(strategy, size, asked) for size in sizes]
    return [predict(strategy, work, mesh, assumed) for mesh in meshes if mesh is not None]
