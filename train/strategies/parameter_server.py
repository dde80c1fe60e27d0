"""The strategy of `tf.distribute.ParameterServerStrategy`: servers hold the variables, a chief dispatches to workers.

Asynchronous: each worker takes a whole global batch, computes its gradient with the variables of that moment and
updates them at once. The chief alone runs the loop; it dispatches the steps of the epoch plan in their order, each
once. What a worker that is lost was doing is given to another, by TensorFlow's `ClusterCoordinator`.

A step is traced once, by the chief, and computed by whichever worker the coordinator gives it to. Inside it is one call
of Python in the worker's own process, which reads the rows of a step with the reader that every strategy uses. Counts
on the servers tell how often steps were begun and applied, which is more often than they were dispatched if workers are
lost.
"""

from __future__ import annotations

import json
import queue
import re
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Self

import numpy as np

from shardmill.dataset.dataset import Dataset, open_pinned
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import Terminated
from shardmill.loader.reader import BatchReader, ReaderSeconds, read_epoch
from shardmill.loader.row_source import RowSource
from shardmill.typed_columns import label_shape
from shardmill.values import Batch, Cursor
from shardmill.words import counted
from train.api import Build, Epoch, Learner, Member, MemberStep, Strategy
from train.backends import BACKENDS
from train.backends.keras.runtime import traced
from train.backends.keras.step import Rows
from train.backends.rules import as_layers_raised_them
from train.config import TrainConfig
from train.contracts.activities import Activity, Stopwatch, during, reading, waiting
from train.contracts.mesh import Mesh
from train.contracts.row_source import row_source
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepOutcome
from train.contracts.world import Role, World
from train.layers.sample_bits import sample_keys
from train.schedules import learning_rate_at
from train.strategies.collective import SingleCollective
from train.strategies.options import ParameterServerOptions
from train.strategies.replicated import ReplicatedMember


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step that a worker has, or will get."""

    step: int
    arguments: tuple[Any, ...]
    answer: Any
    """TensorFlow's `RemoteValue`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer for a finished step."""

    is_applied: bool
    gradient_norm: float
    loss: float
    num_correct: float
    labels_N: np.ndarray
    weights_N: np.ndarray
    sample_ids_N: np.ndarray
    wait_seconds: float
    """Time spent waiting for the rows."""
    fetch_seconds: float
    decode_seconds: float
    """Time of its reader's threads since its last answer."""


class RemoteSteps:
    """Dispatches steps and takes their answers."""

    def __init__(self, learner: Any, coordinator: Any, cluster: list[ClusterTask]) -> None:
        import tensorflow as tf

        self._coordinator = coordinator
        self._num_workers = sum(each.role is Role.WORKER for each in cluster)
        with coordinator.strategy.scope():
            # On a server, like all variables: a worker that is lost takes no count with it.
            self._begun = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            self._applied = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        self._num_dispatched = 0
        self._repeats_seen = (0, 0)
        self._learner = learner
        self._cluster = cluster
        self._trained: list[int] = []
        self._function: Any = None

    def prepare(self) -> None:
        """Trace the step, if that has not been done since the model last changed which of its variables are trained."""
        trained = [id(variable) for variable in self._learner.step.trained_variables]
        if self._function is None or trained != self._trained:
            self._function, self._trained = self._traced(), trained

    def dispatch(self, epoch: int, step: int, global_weight: int, learning_rate: float) -> Dispatched:
        """Queue a step for the next worker that is free."""
        import tensorflow as tf

        self._num_dispatched += 1
        arguments = (
            tf.constant(epoch, tf.int64),
            tf.constant(step, tf.int64),
            tf.constant(global_weight, tf.float32),
            tf.constant(learning_rate, tf.float32),
        )
        return Dispatched(step, arguments, self._scheduled(arguments))

    def answer_of(self, done: Dispatched) -> Answer:
        """Wait for a worker's answer. One that dies when its step is done takes the answer with it: then another worker
        repeats the step, and the counts on the servers tell so."""
        import tensorflow as tf

        answer = done.answer
        for _ in range(self._num_workers):
            try:
                return _answer(answer.get())
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                answer = self._scheduled(done.arguments)
        return _answer(answer.get())

    def take_repeats(self) -> tuple[int, int]:
        """Return how many steps were begun, and applied, more than once since the last call; all dispatched ones are
        done.
        """
        repeats = int(self._begun.numpy()) - self._num_dispatched, int(self._applied.numpy()) - self._num_dispatched
        begun, applied = (now - before for now, before in zip(repeats, self._repeats_seen, strict=True))
        self._repeats_seen = repeats
        return begun, applied

    def _scheduled(self, arguments: tuple[Any, ...]) -> Any:
        return self._coordinator.schedule(self._function, args=arguments)

    def _traced(self) -> Any:
        import tensorflow as tf

        workers = [each for each in self._cluster if each.role is Role.WORKER]
        reads = {(each.reads, each.image_shape_HWC, each.label_dtype, each.label_shape) for each in workers}
        if len(reads) != 1:
            raise TrainingError(
                f"workers read their input in {len(reads)} different ways",
                "expected one",
                "start all processes from the same code",
            )
        read, image_shape_HWC, label_dtype, label_shape = reads.pop()
        types = [tf.uint8, tf.as_dtype(label_dtype), tf.float32, tf.int64, tf.int64, tf.float64]

        def work(epoch: Any, step: Any, global_weight: Any, learning_rate: Any) -> Any:
            with tf.control_dependencies([self._begun.assign_add(1, read_value=False)]):
                # The worker's own Python function, known by a name that it gave: see parameter_server_worker.
                images_NHWC, labels_N, weights_N, sample_keys_N, sample_ids_N, seconds = tf.raw_ops.PyFunc(
                    input=[epoch, step], token=read, Tout=types
                )
            images_NHWC.set_shape([None, *image_shape_HWC])
            labels_N.set_shape([None, *label_shape])
            weights_N.set_shape([None])
            sample_keys_N.set_shape([None])
            rows = Rows(images_NHWC, labels_N, weights_N, sample_keys_N)
            is_applied, gradient_norm, metrics = self._learner.step.whole_without_sum(
                rows, global_weight, learning_rate
            )
            with tf.control_dependencies([is_applied]):
                self._applied.assign_add(1, read_value=False)
            return is_applied, gradient_norm, metrics, labels_N, weights_N, sample_ids_N, seconds

        # Traced here, outside the strategy's scope: inside it Keras's optimizers would exchange gradients themselves.
        signature = [tf.TensorSpec([], dtype) for dtype in (tf.int64, tf.int64, tf.float32, tf.float32)]
        with as_layers_raised_them():
            return traced(work, signature).get_concrete_function()


def _answer(values: tuple[Any, ...]) -> Answer:
    is_applied, gradient_norm, metrics, labels_N, weights_N, sample_ids_N, seconds = [each.numpy() for each in values]
    loss, num_correct = metrics.tolist()
    wait_seconds, fetch_seconds, decode_seconds = seconds.tolist()
    return Answer(
        bool(is_applied),
        float(gradient_norm),
        loss,
        num_correct,
        labels_N,
        weights_N,
        sample_ids_N,
        wait_seconds,
        fetch_seconds,
        decode_seconds,
    )


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
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=NUM_WAITING_THREADS)
    address = f"{world.address}:0"
    server = tf.distribute.Server({job: {number: address}}, job_name=job, task_index=number, config=threads)
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


# Dispatched and not yet answered, for each worker: one that it computes, and one that waits.
STEPS_AHEAD = 2


class ChiefMember(ReplicatedMember):
    """The only member: to evaluation and checkpoints a world of one, whose variables are elsewhere."""

    shares_checkpoints = False

    def __init__(self, learner: Learner, work: RemoteSteps, config: TrainConfig, world: World, reporter: Reporter):
        super().__init__(learner, SingleCollective(), Mesh.one_reader(config).data_index(0))
        self._work = work
        self._config = config
        self._may_begin = world.may_begin
        self._reporter = reporter
        self._pending: deque[Dispatched] = deque()
        self._epoch: Epoch | None = None
        self._read = ReaderSeconds()

    def batches(self, epoch: Epoch, cursor: Cursor) -> PlannedSteps:
        """Steps without rows: workers read them."""
        self._epoch = epoch
        self._work.prepare()
        return PlannedSteps(self, epoch, cursor)

    def dispatch(self, epoch: Epoch, number: int, step: int) -> None:
        """Give the workers all steps up to some ahead of `step`, but none beyond the next checkpoint.

        A checkpoint holds exactly the steps before it. On SIGTERM too: what is dispatched counts as begun, and the loop
        stops behind it.
        """
        from_step = self._pending[-1].step + 1 if self._pending else step
        every = self._config.checkpoint_every_steps
        before = number * epoch.num_steps
        until = min(epoch.num_steps, step + STEPS_AHEAD * self._config.num_workers)
        if every:
            until = min(until, ((before + step) // every + 1) * every - before)
        for each in range(from_step, until):
            if not self._may_begin(before + each):
                break
            learning_rate = learning_rate_at(self._config, before + each, epoch.num_steps)
            self._pending.append(self._work.dispatch(number, each, epoch.num_rows_of_step(each), learning_rate))

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        done = self._pending.popleft()
        assert done.step == batch.step
        stopwatch = Stopwatch()
        with during(self._reporter, waiting("workers' steps")):
            answer = self._work.answer_of(done)
        outcome = StepOutcome(answer.loss, answer.num_correct, answer.gradient_norm, answer.is_applied)
        if outcome.is_applied:
            no_images = np.zeros((0, *batch.images_NHWC.shape[1:]), np.uint8)
            trained = Batch(no_images, answer.labels_N, answer.weights_N, answer.sample_ids_N, batch.epoch, batch.step)
        else:
            # To name the samples, the chief reads them itself.
            assert self._epoch is not None
            with during(self._reporter, Activity("reading a step again")), self._epoch.read(batch.step) as batches:
                trained = next(iter(batches))
        # Workers read and wait at the same time: a step of the loop has the mean of it.
        num_workers = self._config.num_workers
        self._read += ReaderSeconds(answer.fetch_seconds / num_workers, answer.decode_seconds / num_workers)
        input_wait_seconds = min(answer.wait_seconds / num_workers, stopwatch.lap())
        return MemberStep(outcome, 0.0, input_wait_seconds, trained)

    def take_seconds(self) -> ReaderSeconds:
        """Return the average working time of the workers' readers since the last call."""
        taken, self._read = self._read, ReaderSeconds()
        return taken

    def report_repeats(self, epoch: int) -> None:
        """Say what lost workers have had repeated in this epoch."""
        begun, applied = self._work.take_repeats()
        if begun:
            warning = f"{counted(begun, 'step')} given to another worker; {applied} of them had been applied already"
            self._reporter.event(
                "redispatched", {"epoch": epoch, "num_steps": begun, "num_applied_twice": applied, WARNING: warning}
            )


class PlannedSteps:
    """The chief's reader: the steps of an epoch, each dispatched in time."""

    def __init__(self, chief: ChiefMember, epoch: Epoch, cursor: Cursor) -> None:
        self._chief, self._epoch, self._cursor = chief, epoch, cursor

    def __enter__(self) -> PlannedSteps:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        # The epoch's end, or a signal: nothing is on its way.
        if error_type is None or issubclass(error_type, Terminated):
            self._chief.report_repeats(self._cursor.epoch)

    def __iter__(self) -> Iterator[Batch]:
        nothing = np.zeros(0, np.int64)
        number = self._cursor.epoch
        for step in range(self._cursor.step, self._epoch.num_steps):
            self._chief.dispatch(self._epoch, number, step)
            yield Batch(np.zeros((0, 0, 0, 0), np.uint8), nothing, nothing, nothing, number, step)

    def take_seconds(self) -> ReaderSeconds:
        """Return the times of readers in other processes."""
        return self._chief.take_seconds()


def join_chief(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
    """`train.api.Join`, of the chief."""
    import tensorflow as tf

    start_threads()
    with during(reporter, waiting("joining the world")):
        _, *others = world.exchange(b"")
    cluster = [ClusterTask.from_json(each) for each in others]
    addresses = {
        job: [each.address for each in cluster if each.role is role]
        for job, role in (("worker", Role.WORKER), ("ps", Role.SERVER))
    }
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(addresses), rpc_layer="grpc")
    # Without a partitioner variables stay whole, and go to the servers in turn.
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        learner = build()
    return ChiefMember(learner, RemoteSteps(learner, coordinator, cluster), config, world, reporter)


def roles(config: TrainConfig) -> tuple[Role, ...]:
    """A chief, `train.num_workers` workers, `num_servers` servers."""
    num_servers = config.options(ParameterServerOptions).num_servers
    return (Role.CHIEF, *[Role.WORKER] * config.num_workers, *[Role.SERVER] * num_servers)


def check(config: TrainConfig) -> None:
    """Raises UsageError for what it cannot do."""
    if config.reader != "shardmill":
        raise UsageError(
            f"train.reader = {config.reader!r} with train.strategy = 'parameter_server'",
            "a chief dispatches the steps of the epoch plan",
            "set train.reader = 'shardmill'",
        )
    if config.accumulation_steps > 1:
        raise UsageError(
            f"train.accumulation_steps = {config.accumulation_steps} with train.strategy = 'parameter_server'",
            "each worker computes a whole batch at once",
            "remove it, or lower train.global_batch_size: one worker computes all of it for one update",
        )
    if config.ema_decay:
        raise UsageError(
            f"train.ema_decay = {config.ema_decay} with train.strategy = 'parameter_server'",
            "its updates are asynchronous, so no single sequence of weights exists to average",
            "remove train.ema_decay, or use another strategy",
        )
    if config.mixed_precision == "float16":
        raise UsageError(
            "train.mixed_precision = 'float16' with train.strategy = 'parameter_server'",
            "another worker may change the loss scale while a worker computes",
            "set train.mixed_precision = 'bfloat16'",
        )


PARAMETER_SERVER = Strategy(
    backends=("keras",),
    synchronous=False,
    exact_resume=False,
    max_world_size=None,
    join=join_chief,
    # What the chief says of a worker or server that failed or is gone.
    secondary_error=re.compile(
        r"/job:(worker|ps)|Socket closed|failed to connect to all addresses|pyfunc_\d+", re.IGNORECASE
    ),
    check=check,
    roles=roles,
    serve=serve,
    reads_all=True,
    recomputes=False,
    can_skip_batches=False,
)


# Operations that wait for other processes must not take the only thread there is.
NUM_WAITING_THREADS = 4


@dataclass(frozen=True, slots=True)
class ClusterTask:
    """A worker or server, as the chief knows it."""

    role: Role
    address: str
    reads: str = ""
    """For a worker: the name of its TensorFlow function `(epoch, step) -> the rows`."""
    image_shape_HWC: tuple[int, ...] = ()
    label_dtype: str = "int64"
    label_shape: tuple[int, ...] = ()
    """Shape of one label."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Read the output of `to_json`. Raises TrainingError for anything else."""
        try:
            given: dict[str, Any] = json.loads(data)
            shapes: dict[str, Any] = {name: tuple(given.pop(name)) for name in ("image_shape_HWC", "label_shape")}
            return cls(Role(given.pop("role")), **given, **shapes)
        except (ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"a process did not report its address: {error}",
                "expected a worker or server",
                "start all processes with one launcher",
            ) from error


def start_threads() -> None:
    """More than one thread for operations that wait; before TensorFlow runs."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(NUM_WAITING_THREADS)
