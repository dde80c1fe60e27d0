"""The strategies of TensorFlow's mirrored variables: `mirrored`, several devices in one process, and
`multi_worker_mirrored`, one process per worker with gradients summed by TensorFlow.

`mirrored`: a device is to a batch what a rank is elsewhere: it has the whole model and computes the gradient of its
part of the rows. A checkpoint of n devices is therefore one of n ranks: each device's own state is in a file of its
own.

`multi_worker_mirrored`: ranks tell each other their ports through the driver, so there is no TF_CONFIG to write.
TensorFlow's gRPC servers listen on every interface, whatever address they are given (docs/decisions/0006).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.api import Build, Member, StatePart, Strategy
from train.backends.keras.batch_norms import sum_over_replicas
from train.backends.keras.runtime import reseed_seed_states, traced
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, load_arrays, rank_file
from train.checkpoints.checkpoint import SavedFiles
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import World
from train.strategies.collective import AnnouncedCollective, Collective, SingleCollective
from train.strategies.options import MirroredOptions
from train.strategies.replicated import ReplicatedMember


class MirroredMember(ReplicatedMember):
    """The only rank, with one replica on each device. It reads every stream; the rows of a batch are split."""

    shares_checkpoints = False

    def __init__(self, learner: Any, strategy: Any, config: TrainConfig) -> None:
        super().__init__(learner, SingleCollective(), Mesh.of(config).data_index(0))
        self._strategy = strategy
        self._global_batch_size = config.global_batch_size
        # Of the checkpoints.
        self.world_size = strategy.num_replicas_in_sync
        learner.wrap(self._on_all_devices)

    def average_moving_statistics(self) -> None:
        """Their mean, weighted by the rows of each device; equal values keep their exact bits."""
        bounds = self._bounds(self._global_batch_size)
        num_rows = np.diff(bounds)
        for variables in self._own():
            if not variables[0].dtype.is_floating:
                continue
            of_device = [each.numpy().astype(np.float64) for each in variables]
            mean = np.sum([array * num for array, num in zip(of_device, num_rows, strict=True)], axis=0) / bounds[-1]
            for variable in variables:
                variable.assign(mean.astype(variable.dtype.as_numpy_dtype))

    def state_files(self) -> dict[str, list[np.ndarray]]:
        own = {
            rank_file(device): [of_device[device].numpy() for of_device in self._own()]
            for device in range(self.world_size)
        }
        return super().state_files() | own

    def files_to_resume(self, saved: SavedFiles) -> list[str]:
        num_own = self.world_size if saved.world_size == self.world_size else 1
        return [WEIGHTS, OPTIMIZER, *map(rank_file, range(num_own))]

    def start(self, files: Mapping[str, bytes], saved_world_size: int, source: str) -> None:
        # To every device what the first one has.
        self.take_weights(files, source)
        if OPTIMIZER in files:
            self.learner.assign(StatePart.OPTIMIZER, load_arrays(files[OPTIMIZER]), source)
        own = self._own()
        for device in range(1, self.world_size):
            if saved_world_size == self.world_size:
                arrays = load_arrays(files[rank_file(device)])
                for of_device, array in zip(own, arrays, strict=True):
                    of_device[device].assign(array)
            else:
                reseed_seed_states([of_device[device] for of_device in own], device)

    def weight_files(self, saved: SavedFiles) -> list[str]:
        return [WEIGHTS, rank_file(0)]

    def _own(self) -> list[tuple[Any, ...]]:
        """The variables of `StatePart.OWN`, each as one variable for each device."""
        variables: Any = self.learner
        return [self._strategy.experimental_local_results(each.value) for each in variables.variables(StatePart.OWN)]

    def _on_all_devices(self, gradients: Any, rows: Any, global_weight: Any, share: Any) -> list[Any]:
        """Traced: each device's addends for its rows, summed in the order of the devices."""
        import tensorflow as tf

        num_rows = rows.images_NHWC.shape[0]
        bounds = self._bounds(num_rows)

        def on_device() -> list[Any]:
            context: Any = tf.distribute.get_replica_context()
            device = int(tf.get_static_value(context.replica_id_in_sync_group))
            here = slice(bounds[device], bounds[device + 1])
            part = share * ((here.stop - here.start) / num_rows)
            return gradients(rows._make(each[here] for each in rows), global_weight, part)

        of_devices = self._strategy.run(on_device)
        return [self._strategy.reduce(tf.distribute.ReduceOp.SUM, each, axis=None) for each in of_devices]

    def _bounds(self, num_rows: int) -> list[int]:
        """Return the first row of each device, and the end of the last one; parts differ by at most one row."""
        return [num_rows * device // self.world_size for device in range(self.world_size + 1)]


def join_mirrored(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`."""
    import tensorflow as tf

    # Summed on one device and sent back: the same order of additions in every run.
    devices = _devices(config.options(MirroredOptions).num_devices)
    check_rows(config, len(devices))
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        learner = build(sum_in_step=sum_over_replicas)
    return MirroredMember(learner, strategy, config)


def check_mirrored(config: TrainConfig) -> None:
    """`train.api.Strategy.check`; how many devices "all" are is known where they are."""
    check_rows(config, config.options(MirroredOptions).num_devices)


def check_rows(config: TrainConfig, num_devices: int) -> None:
    """Raises UsageError for more devices than a batch, or one of its microbatches, has rows."""
    num_rows = config.global_batch_size // config.num_accumulated
    if num_devices > num_rows:
        asked = config.options(MirroredOptions).num_devices
        given = f"train.mirrored.num_devices = {asked}"
        raise UsageError(
            ("" if asked else f"the {num_devices} devices of ")
            + f"{given} with train.global_batch_size = {config.global_batch_size}"
            + (f" in {config.accumulation_steps} microbatches" if config.accumulation_steps > 1 else ""),
            "expected at least one row for each device",
            f"set train.mirrored.num_devices = {num_rows} or less",
        )


def _devices(wanted: int) -> list[str]:
    """Names of this process's devices: `wanted` GPUs, or all; a machine without GPUs has as many CPUs as are wanted.

    Raises UsageError if they are not there.
    """
    import tensorflow as tf

    gpus = (
        [each.name for each in tf.config.list_logical_devices("GPU")] if tf.config.list_physical_devices("GPU") else []
    )
    if gpus and wanted > len(gpus):
        raise UsageError(
            f"train.mirrored.num_devices = {wanted}",
            f"this process sees {len(gpus)} GPU(s): {', '.join(gpus)}",
            f"set train.mirrored.num_devices = {len(gpus)} or 0",
        )
    if gpus:
        return gpus[: wanted or len(gpus)]
    try:
        [cpu, *_] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * max(1, wanted))
    except RuntimeError:
        # TensorFlow is running already: a notebook, or a test. It keeps the devices that it was started with.
        pass
    cpus = [each.name for each in tf.config.list_logical_devices("CPU")]
    if wanted > len(cpus):
        raise UsageError(
            f"train.mirrored.num_devices = {wanted}",
            f"TensorFlow is already initialized in this process, with {len(cpus)} CPU device(s)",
            "set train.launcher = 'local'",
        )
    return cpus[: wanted or 1]


MIRRORED = Strategy(
    backends=("keras",),
    synchronous=True,
    exact_resume=True,
    syncs_batch_norm=True,
    max_world_size=1,
    devices_per_rank="all",
    can_skip_batches=False,
    join=join_mirrored,
    check=check_mirrored,
)


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
        return self._strategy.run(sum_over_replicas, args=(flat, ""))


def join_multi_worker(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`: meet first, because TensorFlow must know its peers before a variable exists."""

    def join(world: World) -> Collective:
        return TensorFlowCollective(world, strategy) if strategy is not None else SingleCollective()

    strategy = _meet(world) if world.world_size > 1 else None
    sums_moments = config.sync_batch_norm and strategy is not None
    learner: Any = build(sum_in_step=sum_over_replicas if sums_moments else None)
    if strategy is not None:
        # Layers find the replica context, and synchronized batch norm its peers.
        learner.wrap(lambda gradients, *arguments: strategy.run(gradients, args=arguments))
    data = Mesh.of(config).data_index(world.rank)
    collective = AnnouncedCollective(join, world, reporter)
    member = ReplicatedMember(learner, collective, data)
    if sums_moments:
        member.announce_moments(reporter)
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
