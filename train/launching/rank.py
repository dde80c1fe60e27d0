"""The process of one rank, `python -m train.launching.rank PARENT`: gets its task from the driver, and never outlives
it.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from shardmill.child_process import end_with_parent
from shardmill.dataset.dataset import open_pinned
from shardmill.environments.rank_environment import RankEnvironment, read_rank_environment
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.config import is_loopback
from shardmill.jobs.observer import RETRIED, FieldValue
from shardmill.jobs.process import Terminated, log_to_stderr
from shardmill.jobs.reach import check_nonce
from shardmill.stores.retries import begin_under_driver, num_retried
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepReport, TrainResult, from_json
from train.contracts.world import World, ipv4_of
from train.launching.connection import (
    ADDRESS_VARIABLE,
    LANES,
    TOKEN_VARIABLE,
    Connection,
    RankExchange,
    StopPoint,
    call_driver,
)
from train.launching.deadlines import ActivityClock, heartbeat_of
from train.launching.devices import agree_on_devices
from train.launching.messages import (
    Abort,
    Begun,
    Event,
    Exchanged,
    Failure,
    Finished,
    Heartbeat,
    Hold,
    Lane,
    Step,
    StopAfter,
    Stopped,
)
from train.launching.rank_failures import failure_of
from train.strategies import STRATEGIES

DEFAULT_WORKER = "train.rank.worker:run_worker"
HEARTBEAT_SECONDS = 1.0
EXIT_FAILED = 1
EXIT_ABORTED = 3


class Worker(Protocol):
    """The function that a rank runs."""

    def __call__(self, task: WorkerTask, world: World, reporter: Reporter) -> TrainResult: ...


class DriverReporter:
    """Sends everything to the driver; what the rank does now goes with the next heartbeat."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._clock = ActivityClock(time.monotonic())

    def step(self, report: StepReport) -> None:
        self._connection.send(Step(report))

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._connection.send(Event(name, dict(fields)))

    def doing(self, activity: Activity) -> Activity:
        return self._clock.begin(activity, time.monotonic())

    @property
    def heartbeat(self) -> Heartbeat:
        """Return a heartbeat; may be called from any thread."""
        return heartbeat_of(self._clock)


def main() -> NoReturn:
    """Run the worker function that the driver names and end this process: 0 when it returned, 1 when it raised."""
    _end_with_driver()
    begin_under_driver()
    log_to_stderr(others=True)
    place = read_rank_environment()
    # The token is removed from the environment, which user code may print. /proc still shows it to the driver, which
    # identifies its ranks by it.
    address, token = os.environ[ADDRESS_VARIABLE], os.environ.pop(TOKEN_VARIABLE)
    connection, welcome = call_driver(address, token, "rank", place.rank, os.getpid())
    task = from_json(WorkerTask, welcome.task_json)
    exchanges: dict[Lane, RankExchange] = {lane: RankExchange(connection.send, lane) for lane in LANES}
    stop_point = StopPoint()
    receiving = (connection, exchanges, stop_point)
    threading.Thread(target=_receive_from_driver, args=receiving, name="rank-abort", daemon=True).start()
    reporter = DriverReporter(connection)
    threading.Thread(target=_beat, args=(connection, reporter), name="rank-heartbeat", daemon=True).start()
    outcome = _outcome(lambda: _work(task, welcome.worker, place, connection, exchanges, stop_point, reporter), task)
    try:
        connection.send(outcome)
    except OSError:
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: exit handlers of native libraries wait for ranks that will not come.
    os._exit(EXIT_FAILED if isinstance(outcome, Failure) else 0)


def _warn_of_loopback(address: str, place: RankEnvironment) -> None:
    sys.stderr.write(
        f"WARNING: rank {place.rank} is called at {address} of {socket.gethostname()}, a loopback address, and ranks "
        "are on several hosts; set train.nics to the interface of their network, or correct /etc/hosts\n"
    )


def _outcome(work: Callable[[], TrainResult], task: WorkerTask) -> Finished | Stopped | Failure:
    """The last words of this rank."""
    try:
        return Finished(work())
    except Terminated as stopped:
        return Stopped(stopped.how_far)
    except BaseException as error:
        # Anything, also a SystemExit of a user's code: the driver must get it before this process ends.
        return failure_of(error, STRATEGIES[task.config.strategy].secondary_error)


def _work(
    task: WorkerTask,
    worker: str,
    place: RankEnvironment,
    connection: Connection,
    exchanges: Mapping[Lane, RankExchange],
    stop_point: StopPoint,
    reporter: DriverReporter,
) -> TrainResult:
    """Agree with the others on devices, then do what this rank is for."""
    check_shared_storage(task)
    address = ipv4_of(task.config.nics[0]) if task.config.nics else connection.own_address
    if place.ranks_per_node < place.world_size and is_loopback(address):
        _warn_of_loopback(address, place)
    placement = agree_on_devices(place, task.config, exchanges["main"], reporter)
    strategy = STRATEGIES[task.config.strategy]
    world = World(
        place.rank,
        place.world_size,
        place.local_rank,
        place.ranks_per_node,
        address,
        exchanges["main"],
        exchanges["aside"],
        stop_point.may_begin,
        placement,
        role=strategy.roles(task.config)[place.rank],
    )
    if not world.role.runs_loop:
        strategy.serve(task, world, reporter)
    result = load_worker(worker)(task, world, reporter)
    if num_retried():
        # Retries of storage, which only this process can count.
        reporter.event("requests_retried", {"rank": place.rank, RETRIED: num_retried()})
    return result


def _end_with_driver() -> None:
    """Whoever ends a job may signal a whole host: a rank ends with its driver, or when that says so."""
    # The closed connection ends a running rank; a stopped one cannot notice that, so the kernel is asked to kill it.
    end_with_parent(EXIT_ABORTED)
    # No SIG_IGN: what this process starts would inherit that, and could not be ended by SIGTERM.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    # A system call of a library is not to fail for it.
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def check_shared_storage(task: WorkerTask) -> None:
    """Raises UsageError, naming the place and this host, unless the driver's models and dataset are what is seen here.

    The dataset may be a copy, and read-only: its manifest's digest says whether it is the same one.
    """
    if task.reach is None:
        return
    check_nonce(task.reach)
    try:
        open_pinned(task.dataset)
    except (IntegrityError, UsageError) as error:
        raise UsageError(
            f"host {socket.gethostname()} does not see the driver's dataset {task.dataset.uri}: {error.what}",
            "expected storage that every host of the job can read",
            "set dataset.uri to s3://, gs://, az:// or hdfs://, or to a path that is mounted, or copied, on every host",
        ) from error


def load_worker(name: str) -> Worker:
    """The function that `package.module:function` names."""
    module_name, _, function_name = name.partition(":")
    module: Any = importlib.import_module(module_name)
    return getattr(module, function_name)


def _receive_from_driver(
    connection: Connection, exchanges: Mapping[Lane, RankExchange], stop_point: StopPoint
) -> NoReturn:
    """Hand over what the driver says until it wants this process to end, or is gone."""
    while (message := connection.receive()) is not None and not isinstance(message, Abort):
        match message:
            case Exchanged():
                exchanges[message.lane].answer(message)
            case Hold():
                # From this thread: the other one may wait in a collective for a rank that holds already.
                with suppress(OSError):
                    connection.send(Begun(stop_point.hold()))
            case StopAfter(global_step):
                stop_point.stop_after(global_step)
            case _:
                pass
    os._exit(EXIT_ABORTED)


def _beat(connection: Connection, reporter: DriverReporter) -> None:
    while True:
        time.sleep(HEARTBEAT_SECONDS)
        try:
            connection.send(reporter.heartbeat)
        except OSError:
            return


if __name__ == "__main__":
    main()
