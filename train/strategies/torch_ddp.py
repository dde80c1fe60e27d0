"""The strategy of `torch.distributed`: gradients are exchanged while the backward pass computes them.

Gloo on CPUs, NCCL on GPUs. Ranks meet at a store of rank 0 on its own address; the port travels through the driver.

Gradients are summed bucket by bucket. PyTorch's DistributedDataParallel does the same, but lays its buckets out anew
after a process's first step, or else asks all ranks in every step which weights were used (docs/LOG.md). Here the
layout follows from the weights alone, buckets leave in one fixed order, and what the backward pass did not reach counts
as zero.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.api import GLOO_LOST_PEER, Build, Member, MemberStep, Strategy
from train.config import TrainConfig
from train.contracts.activities import Stopwatch, during, waiting
from train.contracts.mesh import DataIndex, Mesh
from train.contracts.values import Reporter
from train.contracts.world import World, nic_with
from train.strategies.collective import AnnouncedCollective
from train.strategies.replicated import ReplicatedMember

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
        reporter: Reporter,
        config: TrainConfig,
    ) -> None:
        super().__init__(learner, collective, data)
        self._torch_learner = learner
        self._reporter = reporter
        self._sums = BucketSums(learner.weights, config)

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        import torch.distributed as dist

        summing: list[Any] = []

        def begin_to_sum(metrics: Any) -> None:
            summing.append(dist.all_reduce(metrics, async_op=True))
            self._sums.begin()

        metrics = self._torch_learner.differentiate(batch, global_weight, self.data.fraction, begin_to_sum)
        # What is left of the exchange after the backward pass could not be hidden behind it.
        with during(self._reporter, waiting("an allreduce")):
            stopwatch = Stopwatch()
            sums = self._sums.finish()
            for work in summing:
                work.wait()
            exposed_seconds = stopwatch.lap()
        return MemberStep(self.learner.apply([*sums, metrics], learning_rate), exposed_seconds)


def join_ddp(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`."""
    data = Mesh.of(config).data_index(world.rank)
    # The only backend that this strategy runs with.
    learner = cast("TorchLearner", build(sum_in_step=partial(_sum_in_step, reporter)))
    if world.rank == 0 and config.compression != "none":
        sizes = {
            "sent_bytes": sum(2 * weight.numel() for weight in learner.weights),
            "gradient_bytes": sum(weight.nbytes for weight in learner.weights),
        }
        reporter.event("compression", {"rank": 0, "compression": config.compression, **sizes})
    collective = AnnouncedCollective(TorchCollective, world, reporter)
    return DdpMember(learner, collective, data, reporter, config)


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


DEFAULT_BYTES = 25 * 2**20
"""PyTorch's default."""
DEFAULT_BYTES_ON_CPU = 4 * 2**20
"""Faster over Gloo (docs/benchmarks/training.md)."""
COMPRESSED = {"none": "", "fp16": "float16", "bf16": "bfloat16"}
"""`train.compression` -> PyTorch's name of the type in which gradients are sent; empty: their own."""
LAST_SENT_BYTES = 2**20
"""Size of the last bucket: small, because no computation is left to hide its exchange."""


class Bucket:
    """Gradients of a few weights, one behind the other in one tensor."""

    def __init__(self, weights: Sequence[Any], compressed: Any | None) -> None:
        import torch

        self.weights = tuple(weights)
        sizes = [weight.numel() for weight in weights]
        self._flat = torch.zeros(sum(sizes), dtype=compressed or weights[0].dtype, device=weights[0].device)
        self._places = self._views(self._flat)
        self.missing: set[int] = set()
        """Weights, by number, whose gradients this step's backward pass has yet to compute."""
        self._work: Any = None

    def begin(self) -> None:
        """Before a backward pass: it computes gradients of the weights that are not frozen."""
        self.missing = {number for number, weight in enumerate(self.weights) if weight.requires_grad}
        self._work = None
        for number in range(len(self.weights)):
            if number not in self.missing:
                self._places[number].zero_()

    def take(self, number: int) -> None:
        """The gradient of a weight is complete: as it is in the cache, and so that its memory is free again."""
        weight, place = self.weights[number], self._places[number]
        if number in self.missing:
            place.copy_(weight.grad)
            self.missing.remove(number)
        elif self._work is None:
            place.add_(weight.grad)
        else:
            # Activations that are computed again by a backward pass inside the backward pass can do that.
            raise TrainingError(
                f"a weight of shape {tuple(weight.shape)} got a gradient twice in one backward pass",
                "expected one: the first was already summed over the ranks",
                "use torch.utils.checkpoint with use_reentrant=False",
            )
        weight.grad = None

    def take_the_rest(self) -> None:
        """The backward pass is over: what it did not reach has the gradient of earlier microbatches, or none."""
        for number in self.missing:
            weight = self.weights[number]
            if weight.grad is None:
                self._places[number].zero_()
            else:
                self._places[number].copy_(weight.grad)
        self.missing.clear()

    def send(self) -> None:
        """Begin to sum it, unless all of its weights are frozen, on all ranks alike."""
        import torch.distributed as dist

        if any(weight.requires_grad for weight in self.weights):
            self._work = dist.all_reduce(self._flat, async_op=True)

    def sums(self) -> list[Any]:
        """Sums in the order of the weights; float32, valid until the next step."""
        if self._work is not None:
            self._work.wait()
        summed = self._flat.float()
        return self._places if summed is self._flat else self._views(summed)

    def _views(self, flat: Any) -> list[Any]:
        parts = flat.split([weight.numel() for weight in self.weights])
        return [part.view(weight.shape) for part, weight in zip(parts, self.weights, strict=True)]


class BucketSums:
    """All gradients of a model. In each step `begin`, then a backward pass, then `finish`; on all ranks alike.

    With `train.sync_batch_norm` nothing leaves before `finish`.
    """

    def __init__(self, weights: Sequence[Any], config: TrainConfig) -> None:
        import torch

        default_bytes = DEFAULT_BYTES_ON_CPU if weights[0].device.type == "cpu" else DEFAULT_BYTES
        sizes = [((each.dtype, each.device), each.numel() * each.element_size()) for each in weights]
        self._layout = layout(sizes, config.bucket_bytes or default_bytes)
        sent = COMPRESSED[config.compression]
        compressed = getattr(torch, sent) if sent else None
        self._buckets = [Bucket([weights[index] for index in indices], compressed) for indices in self._layout]
        self._num_sent = 0
        self._collects = False
        # Batch norms sum over ranks during the backward pass, too. When a bucket is complete depends on the weights
        # that a rank uses: sent then, it could be one rank's exchange before such a sum, and another's after it.
        self._waits = config.sync_batch_norm
        for bucket in self._buckets:
            for number, weight in enumerate(bucket.weights):
                weight.register_post_accumulate_grad_hook(partial(self._take, bucket, number))

    def begin(self) -> None:
        """The next backward pass completes the gradients."""
        self._num_sent, self._collects = 0, True
        for bucket in self._buckets:
            bucket.begin()

    def finish(self) -> list[Any]:
        """After that pass: the sums over all ranks, in the order of the weights. They hold until the next step."""
        self._collects = False
        for bucket in self._buckets[self._num_sent :]:
            bucket.take_the_rest()
            bucket.send()
        sums = {}
        for indices, bucket in zip(self._layout, self._buckets, strict=True):
            sums |= dict(zip(indices, bucket.sums(), strict=True))
        return [sums[index] for index in range(len(sums))]

    def _take(self, bucket: Bucket, number: int, _: Any) -> None:
        """The hook of one weight. Earlier microbatches leave their gradients where they are."""
        if not self._collects:
            return
        bucket.take(number)
        if self._waits:
            return
        # In the one order that all ranks have, whatever order their gradients come in.
        while self._num_sent < len(self._buckets) and not self._buckets[self._num_sent].missing:
            self._buckets[self._num_sent].send()
            self._num_sent += 1


def layout(kinds_and_bytes: Sequence[tuple[object, int]], limit_bytes: int) -> list[list[int]]:
    """Return the weights, by number, of each bucket, in the order in which buckets are sent: the last weights first.

    A bucket holds weights of one kind (type and device), up to the limit or a single one that is larger.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[object, tuple[list[int], int]] = {}
    limits: dict[object, int] = {}
    for index, (kind, num_bytes) in enumerate(kinds_and_bytes):
        indices, filled = open_buckets.get(kind, ([], 0))
        if indices and filled + num_bytes > limits.get(kind, min(LAST_SENT_BYTES, limit_bytes)):
            buckets.append(indices)
            limits[kind] = limit_bytes
            indices, filled = [], 0
        open_buckets[kind] = [*indices, index], filled + num_bytes
    buckets += [indices for indices, _ in open_buckets.values()]
    return sorted(buckets, reverse=True)


TORCH_DDP = Strategy(
    backends=("torch",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    can_skip_batches=True,
    max_world_size=None,
    join=join_ddp,
    compressions=tuple(COMPRESSED),
    secondary_error=re.compile(
        rf"{GLOO_LOST_PEER}|Dist(Backend|Network|Store)Error|NCCL error|ProcessGroup\w+.*(timeout|abort)", re.IGNORECASE
    ),
)
