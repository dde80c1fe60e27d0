"""Workers and servers of the strategy `parameter_server`: each runs a TensorFlow gRPC server; workers also read.

A worker computes what its chief traced. Inside that is one call of Python in the worker's own process: it reads the
rows of a step of the plan with the reader that every strategy uses.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_pinned
from shardmill.loader.reader import BatchReader, ReaderSeconds, read_epoch
from shardmill.loader.row_source import RowSource
from shardmill.typed_columns import label_shape
from shardmill.values import Batch
from train.backends import BACKENDS
from train.backends.keras.runtime import traced
from train.config import TrainConfig
from train.contracts.activities import during, reading, waiting
from train.contracts.epochs import row_source
from train.contracts.stopwatch import Stopwatch
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter
from train.contracts.world import Role, World
from train.layers.sample_bits import sample_keys
from train.strategies.parameter_server_cluster import ClusterTask, start_threads


class StepReader:
    """Reads the steps that a worker is given, in any order, and the one that it is likely to get next."""

    def __init__(self, dataset: Dataset, config: TrainConfig, reporter: Reporter) -> None:
        self._dataset, self._config, self._reporter = dataset, config, reporter
        self._plan_spec = config.plan_spec(dataset)
        self._reading = reading("reading a batch", dataset.store)
        self._lock = threading.Lock()
        self._epoch = -1
        self._num_steps = 0
        self._source: RowSource | None = None
        self._reader: BatchReader | None = None
        self._ahead: dict[int, Future[Batch]] = {}
        self.errors: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def __call__(self, epoch: Any, step: Any) -> tuple[np.ndarray, ...]:
        """The rows of a step: images, labels, weights, sample keys, sample ids; then seconds: waiting for them, and
        since the last call fetching and decoding. Called by TensorFlow."""
        try:
            with self._lock:
                stopwatch = Stopwatch()
                with during(self._reporter, self._reading):
                    batch, read = self._read(int(epoch), int(step))
                wait_seconds = stopwatch.lap()
        except BaseException as error:
            # This process tells its driver what it was; to the chief it is a failed operation.
            self.errors.put(error)
            raise
        seconds = np.array([wait_seconds, read.fetch, read.decode])
        keys_N = sample_keys(self._config.seed, batch.epoch, batch.sample_ids_N)
        weights_N = batch.weights_N.astype(np.float32)
        return batch.images_NHWC, batch.labels_N, weights_N, keys_N, batch.sample_ids_N, seconds

    def _read(self, epoch: int, step: int) -> tuple[Batch, ReaderSeconds]:
        if self._reader is None or epoch != self._epoch:
            self._open(epoch)
        assert self._reader is not None
        found = self._ahead.get(step) or self._reader.submit(step)
        # Equally fast workers take turns.
        likely = step + self._config.num_workers
        self._ahead = {number: future for number, future in self._ahead.items() if number == likely}
        if likely < self._num_steps and likely not in self._ahead:
            self._ahead[likely] = self._reader.submit(likely)
        return found.result(), self._reader.take_seconds()

    def _open(self, epoch: int) -> None:
        if self._reader is not None:
            self._reader.close()
        spec = self._plan_spec
        plan = self._dataset.plan_epoch(spec, epoch)
        self._source = self._source or row_source(self._config, self._dataset, spec, range(spec.num_streams))
        self._reader = read_epoch(self._source, plan)
        self._epoch, self._num_steps, self._ahead = epoch, plan.num_steps, {}


def serve(task: WorkerTask, world: World, reporter: Reporter) -> NoReturn:
    """Serve the chief until the driver ends this process. Raises what went wrong when a worker read its rows."""
    import tensorflow as tf

    BACKENDS["keras"].start(world, task.config.seed)
    start_threads()
    job = {Role.WORKER: "worker", Role.SERVER: "ps"}[world.role]
    # Number 0 is the chief; then come all workers, then the servers.
    number = world.rank - 1 - (task.config.num_workers if world.role is Role.SERVER else 0)
    dataset = open_pinned(task.dataset)
    read = StepReader(dataset, task.config, reporter) if world.role is Role.WORKER else None
    named = _named(read) if read is not None else None
    # Port 0: the kernel chooses when the server binds it. The chief tells everybody the whole cluster.
    server = tf.distribute.Server({job: {number: f"{world.address}:0"}}, job_name=job, task_index=number)
    port = server.target.rpartition(":")[2]
    own = ClusterTask(world.role, f"{world.address}:{port}")
    if read is not None and named is not None:
        schema, mixes = dataset.manifest.row_schema, task.config.augment.mixes
        num_classes = len(schema.class_names)
        own = ClusterTask(
            world.role,
            own.address,
            reads=named.name,
            image_shape_HWC=task.config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC),
            label_dtype="int64" if schema.has_class and not mixes else "float32",
            label_shape=(num_classes,) if mixes else label_shape(schema.label_type, num_classes),
        )
    world.exchange(own.to_json())
    # What it computes of a step is the chief's.
    reporter.doing(waiting("the chief's steps"))
    errors = read.errors if read is not None else queue.SimpleQueue[BaseException]()
    raise errors.get()


@dataclass(frozen=True, slots=True)
class NamedFunction:
    """A Python function that TensorFlow's runtime in this process finds by name, as long as this value lives."""

    name: str
    traced: Any


def _named(read: StepReader) -> NamedFunction:
    """Make `read` known to TensorFlow in this process.

    A remote graph can call it: the operation PyFunc runs in the process to which it is sent, and takes the function by
    its name there.
    """
    import tensorflow as tf

    dtype = tf.int64
    outputs = [tf.uint8, tf.int64, tf.float32, tf.int64, tf.int64, tf.float64]
    function = traced(lambda epoch, step: tf.numpy_function(read, [epoch, step], outputs)).get_concrete_function(
        tf.TensorSpec([], dtype), tf.TensorSpec([], dtype)
    )
    [operation] = [each for each in function.graph.get_operations() if each.type == "PyFunc"]
    return NamedFunction(operation.get_attr("token").decode(), function)
