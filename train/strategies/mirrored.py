"""The strategy of several devices in one process: `tf.distribute.MirroredStrategy`.

A device is to a batch what a rank is elsewhere: it has the whole model and computes the gradient of its part of the
rows. A checkpoint of n devices is therefore one of n ranks: each device's own state is in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import Learner, StatePart
from train.backends.keras.batch_norms import sum_over_replicas
from train.backends.keras.runtime import decorrelate_seed_states
from train.checkpoints.checkpoint import SavedFiles
from train.checkpoints.state import OPTIMIZER, WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.contracts.values import Reporter
from train.contracts.world import World, alone
from train.strategies.collective import SingleCollective
from train.strategies.member import Member
from train.strategies.options import MirroredOptions
from train.strategies.replicated import ReplicatedMember
from train.strategies.strategy import Strategy


class MirroredMember(ReplicatedMember):
    """The only rank, with one replica on each device. It reads every stream; the rows of a batch are split."""

    def __init__(self, learner: Any, strategy: Any, config: TrainConfig) -> None:
        super().__init__(learner, SingleCollective(), Mesh.of(config).data_index(0), alone)
        self._strategy = strategy
        self._global_batch_size = config.global_batch_size
        # Of the checkpoints.
        self.world_size = strategy.num_replicas_in_sync
        learner.wrap(self._on_all_devices)
        learner.sum_moments_by(sum_over_replicas)

    def average_moving_statistics(self) -> None:
        """Their mean, weighted by the rows of each device; equal values keep their exact bits."""
        bounds = self._bounds(self._global_batch_size)
        num_rows = np.diff(bounds)
        variables = self._own()
        for place in self.learner.moving_statistics():
            of_device = [each.numpy().astype(np.float64) for each in variables[place]]
            mean = np.sum([array * num for array, num in zip(of_device, num_rows, strict=True)], axis=0) / bounds[-1]
            for variable in variables[place]:
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
                decorrelate_seed_states([of_device[device] for of_device in own], device)

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


def join_mirrored(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`."""
    import tensorflow as tf

    # Summed on one device and sent back: the same order of additions in every run.
    devices = _devices(config.options(MirroredOptions).num_devices)
    check_rows(config, len(devices))
    strategy = tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        learner = build()
    return MirroredMember(learner, strategy, config)


def check_mirrored(config: TrainConfig) -> None:
    """`train.strategies.strategy.Strategy.check`; how many devices "all" are is known where they are."""
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
    leaves_out_batches=False,
    join=join_mirrored,
    check=check_mirrored,
)
