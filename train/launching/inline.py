"""The launcher of one rank in the current process: the fastest start, and debuggers work.

A thread watches the rank by the deadlines of ranks elsewhere (`train.launching.deadlines`), but for silence: nobody
inside can tell it. It reports a long pause, and ends the process if the pause continues.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType

from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import WARNING, FieldValue
from shardmill.jobs.process import environment_variable, stopping_in_order
from shardmill.values import Cursor
from train.api import Launcher
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import StepReport, TrainResult
from train.contracts.world import World
from train.launching.deadlines import ActivityClock, Deadlines, heartbeat_of
from train.launching.devices import agree_on_devices, device_environment
from train.launching.messages import Hello
from train.launching.processes import gathered
from train.launching.rank import DEFAULT_WORKER, load_worker
from train.launching.rank_failures import FaultKind, RankFault, error_of, failure_of
from train.reporting.observer import StepAssembler, TrainObserver, report_stopping

TICK_SECONDS = 0.2
# For the exception to end what the main thread does; native code may not let it.
GRACE_SECONDS = 30.0
_SIGNAL = signal.SIGUSR2
_DEBUGGERS = {"bdb", "pdb", "debugpy", "pydevd"}


class Stalled(BaseException):
    """Raised in the main thread, wherever it stands. No Exception: a user's code must not take it for its own."""


class InlineWatch:
    """The state of the only rank; `step` and `doing` are called by the training thread."""

    def __init__(self, config: TrainConfig, observer: TrainObserver, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: the clock, in seconds."""
        self.fault: RankFault | None = None
        self._now = now
        self._observer = observer
        self._deadlines = Deadlines(config, now())
        self._clock = ActivityClock(now())
        [self._rank] = self._deadlines.ranks
        self._rank.hello = Hello("rank", 0, socket.gethostname(), os.getpid(), "", "")
        self._rank.is_connected = True
        self._max_tick_seconds = config.watch.silent_seconds / 2
        self._deadlines.restart_clocks(now())

    def step(self, step: Cursor) -> None:
        self._deadlines.progress(self._rank, self._now())
        self._rank.last_step = step

    def doing(self, activity: Activity) -> Activity:
        return self._clock.begin(activity, self._now())

    def watch(self, trains: threading.Thread, is_over: threading.Event) -> None:
        """Watch until the rank finishes or must be ended."""
        ticked_seconds = self._now()
        while not is_over.wait(TICK_SECONDS):
            now = self._now()
            # This process was suspended, or a user is debugging it.
            if now - ticked_seconds > self._max_tick_seconds or _is_in_debugger(trains):
                self._deadlines.restart_clocks(now)
                self._clock.restart(now)
            ticked_seconds = self._rank.seen_seconds = now
            beat = heartbeat_of(self._clock)
            # There is no other rank that it could wait for.
            beat = replace(beat, activity=replace(beat.activity, waits=False))
            self._deadlines.heartbeat(self._rank, beat, now)
            for rank, pause in self._deadlines.paused(now):
                self._observer.event("rank_paused", {"rank": 0, "where": rank.where, WARNING: pause})
            missed = self._deadlines.missed(now)
            if missed:
                self.fault = missed[0]
                signal.pthread_kill(trains.ident or 0, _SIGNAL)
                if not is_over.wait(GRACE_SECONDS):
                    self._end_process(self.fault)
                return

    def _end_process(self, fault: RankFault) -> None:
        # The current stack, for debugging.
        faulthandler.dump_traceback(all_threads=True)
        error = error_of(fault)
        sys.stderr.write(f"ERROR {error.exit_code}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)


@contextmanager
def watching(watch: InlineWatch) -> Iterator[None]:
    """Inside, `Stalled` is raised if the rank makes no progress for too long.

    Only the main thread can be ended so: in another one nothing is watched.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        yield
        return
    is_over = threading.Event()
    before = signal.signal(_SIGNAL, _raise_stalled)
    threading.Thread(target=watch.watch, args=(thread, is_over), name="inline-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        signal.signal(_SIGNAL, before)


def _raise_stalled(number: int, frame: FrameType | None) -> None:
    raise Stalled


def _is_in_debugger(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


class ObserverReporter:
    """Hands everything to the observer at once."""

    def __init__(self, observer: TrainObserver, watch: InlineWatch) -> None:
        self._observer = observer
        self._watch = watch
        self._steps = StepAssembler(world_size=1)
        self.last_step: Cursor | None = None

    def step(self, report: StepReport) -> None:
        self.last_step = Cursor(report.epoch, report.step)
        self._watch.step(self.last_step)
        step = self._steps.add(report)
        assert step is not None
        self._observer.step(step)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._observer.event(name, {"rank": 0, **fields})

    def doing(self, activity: Activity) -> Activity:
        return self._watch.doing(activity)


def check_one_rank(world_size: int, spark: SparkConfig) -> None:
    """Raises UsageError for more than one rank."""
    if world_size != 1:
        raise UsageError(
            f"train.launcher = 'inline' with train.num_workers = {world_size}",
            "it runs one worker, in this process",
            "set train.launcher to 'local' or 'spark_barrier', or train.num_workers to 1",
        )


def launch_inline(
    task: WorkerTask, spark: SparkConfig, observer: TrainObserver, worker: str = DEFAULT_WORKER
) -> TrainResult:
    """Run the only rank here. Raises UsageError for more than one, TrainingError for what is not a ShardmillError and
    for a rank that hangs; Terminated when a signal has come and the training has stopped."""
    check_one_rank(task.config.num_workers, spark)
    with gathered(observer) as recorded:
        return _train_here(task, recorded, worker)


def _train_here(task: WorkerTask, observer: TrainObserver, worker: str) -> TrainResult:
    place, config = RankEnvironment(0, 1, 0, 1), task.config
    watch = InlineWatch(config, observer)
    reporter = ObserverReporter(observer, watch)
    try:
        with stopping_in_order(config.watch.stop_timeout_seconds) as request, ExitStack() as stack:

            def may_begin(global_step: int) -> bool:
                if request.is_made:
                    report_stopping(observer)
                return not request.is_made

            for name, value in device_environment(place, config).items():
                stack.enter_context(environment_variable(name, value))
            world = World(may_begin=may_begin)
            world = replace(world, placement=agree_on_devices(place, config, world.exchange, reporter))
            with watching(watch):
                return load_worker(worker)(task, world, reporter)
    except ShardmillError:
        raise
    except Stalled:
        assert watch.fault is not None
        raise error_of(watch.fault) from None
    except (Exception, SystemExit) as error:
        # Models and factories are the user's: anything may come, and all of it means that the rank failed; their
        # sys.exit(0), too, which would else end the whole command as a success.
        fault = RankFault(
            FaultKind.FAILED, 0, "this process", 0.0, last_step=reporter.last_step, failure=failure_of(error)
        )
        raise error_of(fault) from error


INLINE = Launcher(
    launch_inline,
    check=check_one_rank,
    ranks_here=lambda world_size, spark: 1,
    starts_again=False,
    in_this_process=True,
    starts_helpers=False,
)
