"""The launcher of one rank in the current process: the fastest start, and debuggers work."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from shardmill.environments.place import Place
from shardmill.errors import ShardmillError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.jobs.process import environment_variable, stopping_in_order
from shardmill.values import Cursor
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import StepReport, TrainResult
from train.contracts.world import World
from train.launching import Launcher
from train.launching.devices import agree_on_devices, device_environment
from train.launching.faults import FaultKind, RankFault, error_of, failure_of
from train.launching.inline_output import gathered
from train.launching.inline_watch import InlineWatch, Stalled, watching
from train.launching.rank import DEFAULT_WORKER, load_worker
from train.reporting.observer import StepAssembler, TrainObserver


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
    for a rank that hangs; Terminated when SIGTERM has come and the training has stopped."""
    check_one_rank(task.config.num_workers, spark)
    with gathered(observer) as recorded:
        return _train_here(task, recorded, worker)


def _train_here(task: WorkerTask, observer: TrainObserver, worker: str) -> TrainResult:
    place, config = Place(0, 1, 0, 1), task.config
    watch = InlineWatch(config, observer)
    reporter = ObserverReporter(observer, watch)
    try:
        with stopping_in_order(config.watch.stop_timeout_seconds) as request, ExitStack() as stack:
            for name, value in device_environment(place, config).items():
                stack.enter_context(environment_variable(name, value))
            world = World(may_begin=lambda global_step: not request.is_made)
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
