"""The strategy of `tf.distribute.ParameterServerStrategy`: servers hold the variables, a chief dispatches to workers.

Asynchronous: each worker takes a whole global batch, computes its gradient with the variables of that moment and
updates them at once. The chief alone runs the loop; it dispatches the steps of the epoch plan in their order, each
once. What a worker that is lost was doing is given to another, by TensorFlow's `ClusterCoordinator`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.observer import WARNING
from shardmill.reader import ReaderSeconds
from shardmill.values import Batch, Cursor
from train.backends.backend import Learner, StepOutcome
from train.config import TrainConfig
from train.reading import Epoch
from train.roles import Role
from train.strategies.collective import SingleCollective
from train.strategies.member import DataIndex, Member, MemberStep
from train.strategies.parameter_server_worker import Helper, serve, start_threads
from train.strategies.replicated import ReplicatedMember, StreamShare
from train.strategies.strategy import Strategy
from train.values import Reporter, World

# Dispatched and not yet answered, for each worker: one that it computes, and one that waits.
STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step that a worker has, or will get."""

    step: int
    arguments: tuple[Any, ...]
    answer: Any
    """TensorFlow's `RemoteValue`."""


class ChiefMember(ReplicatedMember):
    """The only member: to evaluation and checkpoints a world of one, whose variables are elsewhere."""

    def __init__(self, learner: Any, coordinator: Any, helpers: list[Helper], config: TrainConfig, reporter: Reporter):
        super().__init__(
            learner, SingleCollective(), DataIndex(0, 1), StreamShare(config.num_streams, config.num_streams)
        )
        self._coordinator = coordinator
        self._config = config
        self._reporter = reporter
        self._num_ahead = STEPS_AHEAD * sum(helper.role is Role.WORKER for helper in helpers)
        self._work = RemoteStep(learner, coordinator.strategy, helpers)
        self._pending: deque[Dispatched] = deque()
        self._epoch: Epoch | None = None

    def batches(self, epoch: Epoch, cursor: Cursor) -> PlannedSteps:
        """Steps without rows: workers read them."""
        self._epoch = epoch
        return PlannedSteps(self, epoch, cursor)

    def dispatch(self, epoch: Epoch, number: int, step: int) -> None:
        """Give the workers all steps up to some ahead of `step`, but none beyond the next checkpoint.

        A checkpoint holds exactly the steps before it.
        """
        from_step = self._pending[-1].step + 1 if self._pending else step
        every = self._config.checkpoint_every_steps
        before = number * epoch.num_steps
        until = min(epoch.num_steps, step + self._num_ahead)
        if every:
            until = min(until, ((before + step) // every + 1) * every - before)
        for each in range(from_step, until):
            learning_rate = self._config.learning_rate_at(before + each, epoch.num_steps)
            arguments = self._work.arguments(number, each, epoch.num_rows_of_step(each), learning_rate)
            self._pending.append(Dispatched(each, arguments, self._scheduled(arguments)))

    def train_step(self, batch: Batch, global_weight: int, learning_rate: float | None) -> MemberStep:
        done = self._pending.popleft()
        assert done.step == batch.step
        self._reporter.doing("workers' steps", waits=True)
        is_applied, gradient_norm, figures, labels_N, weights_N, sample_ids_N = self._fetched(done)
        self._reporter.doing("its own work")
        loss, num_correct = figures.tolist()
        outcome = StepOutcome(loss, num_correct, float(gradient_norm), bool(is_applied))
        if outcome.is_applied:
            no_images = np.zeros((0, *batch.images_NHWC.shape[1:]), np.uint8)
            trained = Batch(no_images, labels_N, weights_N, sample_ids_N, batch.epoch, batch.step)
        else:
            # To name the samples, the chief reads them itself.
            assert self._epoch is not None
            with self._epoch.read(batch.step) as batches:
                trained = next(iter(batches))
        return MemberStep(outcome, 0.0, trained)

    def _scheduled(self, arguments: tuple[Any, ...]) -> Any:
        return self._coordinator.schedule(self._work.function, args=arguments)

    def _fetched(self, done: Dispatched) -> list[np.ndarray]:
        """What a worker answered. One that dies when its step is done takes the answer with it: then another repeats
        the step, and the counts on the servers tell so."""
        import tensorflow as tf

        answer = done.answer
        for _ in range(self._config.num_workers):
            try:
                return [each.numpy() for each in answer.get()]
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                answer = self._scheduled(done.arguments)
        return [each.numpy() for each in answer.get()]

    def report_repeats(self, epoch: int) -> None:
        """Say what lost workers have had repeated in this epoch."""
        begun, applied = self._work.take_repeats()
        if begun:
            warning = f"{begun} step(s) were given to another worker; {applied} of them had been applied already"
            self._reporter.event(
                "redispatched", {"epoch": epoch, "num_steps": begun, "num_applied_twice": applied, WARNING: warning}
            )


class PlannedSteps:
    """What the loop takes for a reader: the steps of an epoch, each dispatched in time."""

    def __init__(self, chief: ChiefMember, epoch: Epoch, cursor: Cursor) -> None:
        self._chief, self._epoch, self._cursor = chief, epoch, cursor

    def __enter__(self) -> PlannedSteps:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is None:
            self._chief.report_repeats(self._cursor.epoch)

    def __iter__(self) -> Iterator[Batch]:
        nothing = np.zeros(0, np.int64)
        number = self._cursor.epoch
        for step in range(self._cursor.step, self._epoch.num_steps):
            self._chief.dispatch(self._epoch, number, step)
            yield Batch(np.zeros((0, 0, 0, 0), np.uint8), nothing, nothing, nothing, number, step)

    def take_seconds(self) -> ReaderSeconds:
        """The readers are in other processes."""
        return ReaderSeconds()


class RemoteStep:
    """What a worker does for a step: read, compute, update; and how often that was begun and done."""

    def __init__(self, learner: Any, strategy: Any, helpers: list[Helper]) -> None:
        import tensorflow as tf

        workers = [helper for helper in helpers if helper.role is Role.WORKER]
        reads = {(helper.reads, helper.image_shape_HWC, helper.label_dtype, helper.label_shape) for helper in workers}
        if len(reads) != 1:
            raise TrainingError(f"workers read in {len(reads)} ways", "expected one", "start all from the same code")
        read, image_shape_HWC, label_dtype, label_shape = reads.pop()
        with strategy.scope():
            # On a server, like all variables: a worker that is lost takes no count with it.
            self._begun = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            self._applied = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        self._num_dispatched = 0
        self._seen = (0, 0)
        scalars = (tf.int64, tf.int64, tf.float32, tf.float32)

        def work(epoch: Any, step: Any, global_weight: Any, learning_rate: Any) -> Any:
            with tf.control_dependencies([self._begun.assign_add(1, read_value=False)]):
                # The worker's own Python function, known by a name that it gave: see parameter_server_worker.
                images_NHWC, labels_N, weights_N, sample_ids_N = tf.raw_ops.PyFunc(
                    input=[epoch, step], token=read, Tout=[tf.uint8, tf.as_dtype(label_dtype), tf.float32, tf.int64]
                )
            images_NHWC.set_shape([None, *image_shape_HWC])
            labels_N.set_shape([None, *label_shape])
            weights_N.set_shape([None])
            is_applied, gradient_norm, figures = learner.step.whole(
                images_NHWC, labels_N, weights_N, global_weight, learning_rate
            )
            with tf.control_dependencies([is_applied]):
                self._applied.assign_add(1, read_value=False)
            return is_applied, gradient_norm, figures, labels_N, weights_N, sample_ids_N

        # Traced here, outside the strategy's scope: inside it Keras's optimizers would exchange gradients themselves.
        signature = [tf.TensorSpec([], dtype) for dtype in scalars]
        self.function = tf.function(work, input_signature=signature).get_concrete_function()

    def arguments(self, epoch: int, step: int, global_weight: int, learning_rate: float) -> tuple[Any, ...]:
        """What `function` is called with; it counts as dispatched."""
        import tensorflow as tf

        self._num_dispatched += 1
        return (
            tf.constant(epoch, tf.int64),
            tf.constant(step, tf.int64),
            tf.constant(global_weight, tf.float32),
            tf.constant(learning_rate, tf.float32),
        )

    def take_repeats(self) -> tuple[int, int]:
        """How many steps were begun, and applied, more than once since the last call; all dispatched ones are done."""
        repeats = int(self._begun.numpy()) - self._num_dispatched, int(self._applied.numpy()) - self._num_dispatched
        begun, applied = (now - before for now, before in zip(repeats, self._seen, strict=True))
        self._seen = repeats
        return begun, applied


def join_chief(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`, of the chief."""
    import tensorflow as tf

    start_threads()
    reporter.doing("joining the world", waits=True)
    _, *others = world.exchange(b"")
    reporter.doing("its own work")
    helpers = [Helper.from_json(each) for each in others]
    jobs = {
        job: [helper.address for helper in helpers if helper.role is role]
        for job, role in (("worker", Role.WORKER), ("ps", Role.SERVER))
    }
    cluster = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(jobs), rpc_layer="grpc")
    # Without a partitioner variables stay whole, and go to the servers in turn.
    strategy = tf.distribute.ParameterServerStrategy(cluster)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        learner = build()
    return ChiefMember(learner, coordinator, helpers, config, reporter)


def roles(config: TrainConfig) -> tuple[Role, ...]:
    """A chief, `train.num_workers` workers, `train.parameter_servers` servers."""
    return (Role.CHIEF, *[Role.WORKER] * config.num_workers, *[Role.SERVER] * config.parameter_servers)


def check(config: TrainConfig) -> None:
    """Raises UsageError for what it cannot do."""
    if config.launcher in ("inline", "attach"):
        raise UsageError(
            f"train.strategy = 'parameter_server' with train.launcher = {config.launcher!r}",
            f"it needs {len(roles(config))} processes: a chief, {config.num_workers} worker(s) and "
            f"{config.parameter_servers} server(s)",
            "set train.launcher to 'local' or 'spark_barrier'",
        )
    if config.reader != "shardmill":
        raise UsageError(
            f"train.reader = {config.reader!r} with train.strategy = 'parameter_server'",
            "a chief dispatches the steps of the epoch plan",
            "set train.reader = 'shardmill'",
        )
    if config.accumulation_steps > 1:
        raise UsageError(
            f"train.accumulation_steps = {config.accumulation_steps} with train.strategy = 'parameter_server'",
            "a worker computes a whole batch at once",
            "lower train.global_batch_size: it is what one worker computes for one update",
        )


PARAMETER_SERVER = Strategy(
    backends=("keras",),
    synchronous=False,
    exact_resume=False,
    checkpoint_layout="replicated",
    max_world_size=None,
    join=join_chief,
    # What the chief says of a worker or server that failed or is gone.
    echo=re.compile(r"/job:(worker|ps)|Socket closed|failed to connect to all addresses|pyfunc_\d+", re.IGNORECASE),
    check=check,
    roles=roles,
    serve=serve,
    shares_streams=False,
    leaves_out_batches=False,
)
