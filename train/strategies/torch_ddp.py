"""The strategy of `torch.distributed`: gradients are exchanged while the backward pass computes them.

Gloo on CPUs, NCCL on GPUs. Ranks meet at a store of rank 0 on its own address; the port travels through the driver.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.backends.backend import Learner
from train.config import TrainConfig
from train.contracts.activities import during, waiting
from train.contracts.mesh import DataIndex, Mesh
from train.contracts.stopwatch import Stopwatch
from train.contracts.values import Reporter
from train.contracts.world import Gather, World
from train.strategies.collective import AnnouncedCollective
from train.strategies.member import Member, MemberStep
from train.strategies.nics import nic_with
from train.strategies.replicated import ReplicatedMember
from train.strategies.strategy import GLOO_LOST_PEER, Strategy
from train.strategies.torch_buckets import COMPRESSED, BucketSums

if TYPE_CHECKING:
    from train.backends.torch.backend import TorchLearner

# The watchdog finds lost ranks; a timeout here would end a job in which one rank is only slow.
TIMEOUT = timedelta(hours=1)


class TorchCollective:
    """`torch.distributed`."""

    def __init__(self, world: World) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist, self._rank = torch, dist, world.rank
        self._world_size = world.world_size
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = nic_with(world.address)
        is_cuda = torch.cuda.is_available()
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=_meet(world),
            rank=world.rank,
            world_size=world.world_size,
            timeout=TIMEOUT,
        )
        # What is not a gradient stays in the host's memory.
        self._hosts = dist.new_group(backend="gloo", timeout=TIMEOUT) if is_cuda else dist.group.WORLD

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Sum as one flat tensor: the order of additions depends on a value's position in it."""
        flat = self._torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        tensor = self._torch.from_numpy(np.array(array))
        self._dist.all_reduce(tensor, group=self._hosts)
        return tensor.numpy()

    def broadcast_bytes(self, data: bytes) -> bytes:
        size = self._torch.tensor([len(data)])
        self._dist.broadcast(size, 0, group=self._hosts)
        if not int(size):
            return b""
        mine = np.frombuffer(data, np.uint8).copy() if self._rank == 0 else np.zeros(int(size), np.uint8)
        tensor = self._torch.from_numpy(mine)
        self._dist.broadcast(tensor, 0, group=self._hosts)
        return tensor.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = self._gather(np.array([len(data)]))
        # All must be of one size.
        longest = max(int(size[0]) for size in sizes)
        padded = np.frombuffer(data.ljust(longest, b"\0"), np.uint8).copy()
        parts = self._gather(padded) if longest else [padded] * self._world_size
        return [part[: int(size[0])].tobytes() for part, size in zip(parts, sizes, strict=True)]

    def barrier(self) -> None:
        self._dist.barrier(group=self._hosts)

    def close(self) -> None:
        self._dist.destroy_process_group()

    def _gather(self, array: np.ndarray) -> list[np.ndarray]:
        mine = self._torch.from_numpy(array)
        parts = [self._torch.empty_like(mine) for _ in range(self._world_size)]
        self._dist.all_gather(parts, mine, group=self._hosts)
        return [part.numpy() for part in parts]


class DdpMember(ReplicatedMember):
    """A replica whose gradients are summed bucket by bucket as the backward pass fills them."""

    def __init__(
        self,
        learner: TorchLearner,
        collective: AnnouncedCollective,
        data: DataIndex,
        gather_aside: Gather,
        reporter: Reporter,
        config: TrainConfig,
    ) -> None:
        super().__init__(learner, collective, data, gather_aside)
        self._torch_learner = learner
        self._reporter = reporter
        self._sums = BucketSums(learner.weights, config)

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        import torch.distributed as dist

        summing: list[Any] = []

        def begin_to_sum(figures: Any) -> None:
            summing.append(dist.all_reduce(figures, async_op=True))
            self._sums.begin()

        figures = self._torch_learner.differentiate(batch, global_weight, self.data.fraction, begin_to_sum)
        # What is left of the exchange after the backward pass could not be hidden behind it.
        with during(self._reporter, waiting("an allreduce")):
            stopwatch = Stopwatch()
            sums = self._sums.finish()
            for work in summing:
                work.wait()
            exposed_seconds = stopwatch.lap()
        return MemberStep(self.learner.apply([*sums, figures], learning_rate), exposed_seconds)


def join_ddp(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`."""
    data = Mesh.of(config).data_index(world.rank)
    # The only backend that this strategy runs with.
    learner = cast("TorchLearner", build())
    if world.rank == 0 and config.compression != "none":
        sizes = {
            "sent_bytes": sum(2 * weight.numel() for weight in learner.weights),
            "gradient_bytes": sum(weight.nbytes for weight in learner.weights),
        }
        reporter.event("compression", {"rank": 0, "compression": config.compression, **sizes})
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    learner.sum_moments_by(partial(_sum_in_step, reporter))
    return DdpMember(learner, collective, data, world.exchange_aside, reporter, config)


def _sum_in_step(reporter: Reporter, tensor: Any, name: str) -> Any:
    """`SumInStep`. In the group of the gradients: with NCCL two groups at a time could wait for each other."""
    import torch.distributed as dist

    with during(reporter, waiting("an allreduce")):
        dist.all_reduce(tensor)
    return tensor


def _meet(world: World) -> Any:
    """The store in which the ranks leave their addresses: at rank 0, on the one address that the others know."""
    import torch.distributed as dist

    open_store: Any = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
    store, told = None, b"{}"
    if world.rank == 0:
        # PyTorch would listen on every interface; the store takes over the socket, and closes it.
        listener = socket.create_server((world.address, 0))
        port = listener.getsockname()[1]
        store = open_store(
            world.address, port, world.world_size, True, TIMEOUT, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        told = json.dumps({"host": world.address, "port": port}).encode()
    [of_rank_0, *_] = world.exchange(told)
    if store is not None:
        return store
    there = json.loads(of_rank_0)
    if not there:
        raise TrainingError(
            "rank 0 did not open its store", "expected its address", "start all ranks with one launcher"
        )
    return open_store(there["host"], there["port"], world.world_size, False, TIMEOUT, wait_for_workers=False)


TORCH_DDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    leaves_out_batches=True,
    max_world_size=None,
    join=join_ddp,
    compressions=tuple(COMPRESSED),
    secondary_error=re.compile(
        rf"{GLOO_LOST_PEER}|Dist(Backend|Network|Store)Error|NCCL error|ProcessGroup\w+.*(timeout|abort)", re.IGNORECASE
    ),
)
