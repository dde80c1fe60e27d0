"""The strategy of `tf.distribute.ParameterServerStrategy`: servers hold the variables, a chief dispatches to workers.

Asynchronous: each worker takes a whole global batch, computes its gradient with the variables of that moment and
updates them at once. The chief alone runs the loop; it dispatches the steps of the epoch plan in their order, each
once. What a worker that is lost was doing is given to another, by TensorFlow's `ClusterCoordinator`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import Terminated
from shardmill.loader.reader import ReaderSeconds
from shardmill.values import Batch, Cursor
from shardmill.words import counted
from train.backends.backend import Learner
from train.config import TrainConfig
from train.contracts.activities import Activity, during, waiting
from train.contracts.epochs import Epoch
from train.contracts.mesh import Mesh
from train.contracts.step_outcome import StepOutcome
from train.contracts.stopwatch import Stopwatch
from train.contracts.values import Reporter
from train.contracts.world import Role, World, alone
from train.schedules import learning_rate_at
from train.strategies.collective import SingleCollective
from train.strategies.member import Member, MemberStep
from train.strategies.options import ParameterServerOptions
from train.strategies.parameter_server_cluster import ClusterTask, start_threads
from train.strategies.parameter_server_step import Dispatched, RemoteSteps
from train.strategies.parameter_server_worker import serve
from train.strategies.replicated import ReplicatedMember
from train.strategies.strategy import Strategy

# Dispatched and not yet answered, for each worker: one that it computes, and one that waits.
STEPS_AHEAD = 2


class ChiefMember(ReplicatedMember):
    """The only member: to evaluation and checkpoints a world of one, whose variables are elsewhere."""

    def __init__(self, learner: Learner, work: RemoteSteps, config: TrainConfig, world: World, reporter: Reporter):
        super().__init__(learner, SingleCollective(), Mesh.one_reader(config).data_index(0), alone)
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

    def __exit__(self, error_type: object, *_: object) -> None:
        # The epoch's end, or SIGTERM: nothing is on its way.
        if error_type in (None, Terminated):
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


def join_chief(world: World, config: TrainConfig, build: Callable[[], Learner], reporter: Reporter) -> Member:
    """`train.strategies.strategy.Join`, of the chief."""
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
    leaves_out_batches=False,
)
