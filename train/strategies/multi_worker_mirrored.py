"""The strategy of `tf.distribute.MultiWorkerMirroredStrategy`: one process per worker, gradients summed by TensorFlow.

Ranks tell each other their ports through the driver, so there is no TF_CONFIG to write. TensorFlow's gRPC servers
listen on every interface, whatever address they are given (docs/decisions/0006).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import Learner
from train.backends.keras.batch_norms import sum_over_replicas
from train.backends.keras.runtime import traced
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective, Collective, SingleCollective
from train.strategies.member import Member
from train.strategies.replicated import ReplicatedMember
from train.strategies.strategy import Strategy


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host that nobody else can get before TensorFlow, inside the `with`, listens on it.

    The kernel gives a port that is bound, on whatever address, to no other process that asks for a free one; and this
    process's server may bind it a second time, because both do so with SO_REUSEPORT. Nothing connects to the first
    socket: it never listens.
    """
    os.environ["TF_GRPC_REUSE_PORT"] = "1"
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


# Collectives of TensorFlow know no bytes; a sum in which all but one rank have zeros is exact in integers.
WORD = np.dtype(np.int32)


class TensorFlowCollective:
    """The collectives of a `MultiWorkerMirroredStrategy`, each compiled once."""

    def __init__(self, world: World, strategy: Any) -> None:
        self._rank, self._world_size = world.rank, world.world_size
        self._exchange = world.exchange
        self._strategy = strategy
        self._summed_group = traced(self._sum_group)
        self._summed_flat: dict[np.dtype, Any] = {}

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Sum as one flat tensor: the order of additions depends on a value's position in it."""
        return self._summed_group(tensors)

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        import tensorflow as tf

        summed = self._summed_flat.get(array.dtype)
        if summed is None:
            signature = [tf.TensorSpec([None], array.dtype)]
            summed = self._summed_flat[array.dtype] = traced(self._sum_flat, signature)
        return summed(tf.constant(array.reshape(-1))).numpy().reshape(array.shape)

    def broadcast_bytes(self, data: bytes) -> bytes:
        [of_rank_0, *_] = self.gather_bytes(data if self._rank == 0 else b"")
        return of_rank_0

    def gather_bytes(self, data: bytes) -> list[bytes]:
        sizes = np.zeros(self._world_size, np.int64)
        sizes[self._rank] = len(data)
        sizes = self.sum_array(sizes)
        num_words = -(-sizes // WORD.itemsize)
        stops = np.cumsum(num_words)
        words = np.zeros(int(stops[-1]), WORD)
        if data:
            padded = data.ljust(int(num_words[self._rank]) * WORD.itemsize, b"\0")
            words[stops[self._rank] - num_words[self._rank] : stops[self._rank]] = np.frombuffer(padded, WORD)
        if len(words):
            words = self.sum_array(words)
        parts = np.split(words, stops[:-1])
        return [part.tobytes()[:size] for part, size in zip(parts, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        self.sum_array(np.zeros(1, np.int32))

    def close(self) -> None:
        """Return when every rank has left its last operation.

        A rank fetches its peers' data from their servers, and a server ends with its process: the first rank to leave
        the last barrier would break the connection of one that is still fetching.
        """
        self._exchange(b"")

    def _sum_group(self, tensors: list[Any]) -> list[Any]:
        import tensorflow as tf

        flat = self._sum_flat(tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0))
        parts = tf.split(flat, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _sum_flat(self, flat: Any) -> Any:
        import tensorflow as tf

        def on_worker(tensor: Any) -> Any:
            context: Any = tf.distribute.get_replica_context()
            # A tensor that comes from outside has no device, and the collective asks for it.
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(tensor))

        return self._strategy.run(on_worker, args=(flat,))


def join_multi_worker(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`: meet first, because TensorFlow must know its peers before a variable exists."""

    def join(world: World) -> Collective:
        return TensorFlowCollective(world, strategy) if strategy is not None else SingleCollective()

    strategy = _meet(world) if world.world_size > 1 else None
    learner: Any = build()
    if strategy is not None:
        # Layers find the replica context, and synchronized batch norm its peers.
        learner.wrap(lambda gradients, *arguments: strategy.run(gradients, args=arguments))
    data = Mesh.of(config).data_index(world.rank)
    collective = AnnouncedCollective(join, world, reporter)
    member = ReplicatedMember(learner, collective, data, world.exchange_aside)
    if config.sync_batch_norm and strategy is not None:
        member.sum_moments_by(sum_over_replicas, reporter)
    return member


def _meet(world: World) -> Any:
    """The strategy, whose server runs; peers are called when the first collective is."""
    import tensorflow as tf
    from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

    # Its own check of peers would end the collectives of those that wait for a stopped rank before the watchdog has
    # found out which one it is.
    CollectiveAllReduceExtended._enable_check_health = False  # pyright: ignore[reportPrivateUsage]
    implementation = tf.distribute.experimental.CommunicationImplementation
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    with reserved_port() as port:
        workers = [address.decode() for address in world.exchange(f"{world.address}:{port}".encode())]
        return tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=world.rank, rpc_layer="grpc"
            ),
            communication_options=tf.distribute.experimental.CommunicationOptions(
                implementation=implementation.NCCL if has_gpu else implementation.RING
            ),
        )


def _check(config: TrainConfig) -> None:
    # What begins in one thread and ends in another, as every collective here does, its recorder merges by pointers that
    # may no longer hold (tsl/profiler/backends/cpu/traceme_recorder.cc): about one rank in 30 was aborted by it.
    if config.log.profile_steps and config.num_workers > 1:
        raise UsageError(
            f"train.log.profile_steps = {config.log.profile_steps!r} with train.strategy = 'multi_worker_mirrored'",
            "TensorFlow's profiler sometimes aborts a process that runs TensorFlow's own collectives",
            "set train.strategy = 'horovod' to record the same model, or remove train.log.profile_steps",
        )


MULTI_WORKER_MIRRORED = Strategy(
    backends=("keras",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    max_world_size=None,
    join=join_multi_worker,
    check=_check,
    secondary_error=re.compile(
        r"Collective ops is aborted|tensorflow\.WorkerService|Connection reset by peer|Socket closed"
        r"|failed to connect to all addresses",
        re.IGNORECASE,
    ),
)
