"""The rank functions of test_multi_rank.py: the real worker, with an added crash or last output."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from shardmill.errors import TrainingError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.observer import FieldValue
from shardmill.stores import open_store
from train.api import Build, Member, StatePart, Strategy
from train.checkpoints.arrays import dump_arrays
from train.config import SHA256_OF_FILE, TrainConfig
from train.contracts.activities import Activity
from train.contracts.task import WorkerTask
from train.contracts.values import Reporter, StepReport, TrainResult, to_json
from train.contracts.world import World
from train.rank.worker import run_worker
from train.strategies import STRATEGIES

KILL_AT = "SHARDMILL_TEST_KILL_AT_STEP"
KILLED_IN = "SHARDMILL_TEST_KILLED_IN"
"""`RANK PLACE`: the failpoint at which that rank dies, and no other rank."""
HELD_FROM = "SHARDMILL_TEST_HELD_FROM_STEP"
_LET_GO = "held-from-step"


def let_go(models: Path | str, held_from: int = sys.maxsize) -> None:
    """From now on the ranks of `every_rank_is_held` are held from this global step on, or no longer."""
    told = Path(models, _LET_GO)
    told.parent.mkdir(parents=True, exist_ok=True)
    told.with_suffix(".new").write_text(str(held_from))
    told.with_suffix(".new").rename(told)


def held(task: WorkerTask, world: World) -> World:
    """It begins no step from the one that the environment names on before a test says so, or all are asked to stop.

    However late the test acts, there is something left to do then.
    """
    told, stop_point = Path(task.models_uri, _LET_GO), getattr(world.may_begin, "__self__", None)

    def is_held(global_step: int) -> bool:
        held_from = told.read_text() if told.exists() else os.environ.get(HELD_FROM, sys.maxsize)
        return global_step >= int(held_from) and not getattr(stop_point, "_is_held", False)

    def may_begin(global_step: int) -> bool:
        while is_held(global_step):
            time.sleep(0.01)
        return world.may_begin(global_step)

    return replace(world, may_begin=may_begin)


def every_rank_is_held(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    return run_worker(task, held(task, world), reporter)


AWAY = "away"
"""The folder of files named by the ranks that a test has stopped or killed."""


def silos_are_late_only_if_they_are_away(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """And held. Rank 0's clock stands, and passes its deadline when all come but those that the test took away."""
    from train.strategies import local_sgd

    clock = SimpleNamespace(seconds=0.0, monotonic=lambda: clock.seconds, sleep=time.sleep)
    arrived, away = local_sgd.SiloMailbox._arrived, Path(task.models_uri, AWAY)
    parts: set[int] = set()

    def arrived_or_away(mailbox: local_sgd.SiloMailbox, kind: str) -> set[int]:
        found = arrived(mailbox, kind)
        if kind == "silo-":
            parts.clear()
            parts.update(found)
        if kind == "begun-":
            late = (mailbox._present | found | mailbox._ranks_of(local_sgd.BACK)) - parts
            if late and late <= {int(file.name) for file in away.glob("*")}:
                clock.seconds += 2 * mailbox._timeout_seconds
        return found

    with patch.object(local_sgd, "time", clock), patch.object(local_sgd.SiloMailbox, "_arrived", arrived_or_away):
        return every_rank_is_held(task, world, reporter)


def _finish_checkpoint() -> None:
    """Return when the checkpoint that was begun is written."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join()


class DyingReporter:
    """Reports, but kills its process instead of reporting the global step that the environment names.

    `7`: that step; `3:20 2:40`: step 20 of three ranks, step 40 of two, and of one rank none.
    """

    _signal = signal.SIGKILL

    def __init__(self, reporter: Reporter, world_size: int = 1) -> None:
        self._reporter = reporter
        self._killed_at = -1
        for each in os.environ.get(KILL_AT, "").split():
            of_size, _, step = each.rpartition(":")
            if of_size in ("", str(world_size)):
                self._killed_at = int(step)

    def step(self, report: StepReport) -> None:
        if report.epoch * report.num_steps + report.step == self._killed_at:
            # So that it is known where the next attempt goes on.
            _finish_checkpoint()
            os.kill(os.getpid(), self._signal)
        self._reporter.step(report)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._reporter.event(name, fields)

    def doing(self, activity: Activity) -> Activity:
        return self._reporter.doing(activity)


class FreezingReporter(DyingReporter):
    """Stops its process instead, which then neither works nor ends."""

    _signal = signal.SIGSTOP


class StallingReporter(DyingReporter):
    """Reports, but stands still instead of reporting the third step."""

    def step(self, report: StepReport) -> None:
        if report.step == 2:
            time.sleep(600)
        self._reporter.step(report)


def last_rank_stalls(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    stalls = world.rank == world.world_size - 1
    return run_worker(task, world, StallingReporter(reporter) if stalls else reporter)


def last_rank_dies(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    dies = world.rank == world.world_size - 1
    return run_worker(task, world, DyingReporter(reporter, world.world_size) if dies else reporter)


def every_loop_dies(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """That of the chief, where the others serve it."""
    return run_worker(task, world, DyingReporter(reporter))


def one_rank_dies_in_a_checkpoint(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    rank, place = os.environ[KILLED_IN].split()
    if world.rank == int(rank):
        os.environ[VARIABLE] = place
    return run_worker(task, world, reporter)


def last_rank_freezes(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    freezes = world.rank == world.world_size - 1
    return run_worker(task, world, FreezingReporter(reporter, world.world_size) if freezes else reporter)


def last_rank_reads_nothing(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """From its storage comes no answer any more."""
    if world.rank == world.world_size - 1:
        no_answer_from(task.dataset.uri)
    return run_worker(task, world, reporter)


def no_answer_from(
    folder: str, after_reads: int = 12, under: str = "", sleep: Callable[[float], None] = time.sleep
) -> None:
    """In this process, once some of it (under a path) has been read: like a mount whose server is gone."""
    from shardmill.stores.local import LocalStore

    num_reads = itertools.count()

    def answering(sound: Callable[..., Any]) -> Callable[..., Any]:
        def read(store: LocalStore, path: str, *arguments: Any) -> Any:
            if store.uri in folder and path.startswith(under) and next(num_reads) >= after_reads:
                sleep(600)
            return sound(store, path, *arguments)

        return read

    LocalStore.read_range = answering(LocalStore.read_range)
    LocalStore.read_blocks = answering(LocalStore.read_blocks)


LATE_SECONDS = 0.25


def last_rank_is_late(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """In every step of a sharded model."""
    from train.strategies.sharded.member import ShardedMember

    if world.rank == world.world_size - 1:
        step = ShardedMember.train_step

        def late(member: ShardedMember, *arguments: Any) -> Any:
            time.sleep(LATE_SECONDS)
            return step(member, *arguments)

        ShardedMember.train_step = late
    return run_worker(task, world, reporter)


def every_rank_reports_its_weights(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    result = run_worker(task, world, reporter)
    evaluation = result.evaluation
    # At 10,000 classes that would be megabytes.
    assert evaluation is None or evaluation.confused is None, "how classes were confused goes to a file"
    assert evaluation is None or world.rank == 0 or not evaluation.per_class, "rank 0 alone tells metrics of classes"
    open_store(task.models_uri).put(f"told/rank-{world.rank}", result.weights_sha256.encode())
    return result


def every_rank_reports_how_much_it_reads(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Number of bytes of the file that `train.init_from` names."""
    from shardmill.stores.local import LocalStore

    name = task.config.init_from.partition(SHA256_OF_FILE)[0].rpartition("/")[2]
    sizes: list[int] = []

    def counted(sound: Callable[..., bytes]) -> Callable[..., bytes]:
        def read(store: LocalStore, path: str, *arguments: Any) -> bytes:
            data = sound(store, path, *arguments)
            if path == name:
                sizes.append(len(data))
            return data

        return read

    LocalStore.read_range, LocalStore.read = counted(LocalStore.read_range), counted(LocalStore.read)
    result = every_rank_reports_its_weights(task, world, reporter)
    open_store(task.models_uri).put(f"read/rank-{world.rank}", str(sum(sizes)).encode())
    return result


def every_rank_reports_its_order(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Of a pipeline: what it computes, one after the other, as PyTorch's stages are called."""
    from torch.distributed.pipelining import PipelineStage

    told: list[tuple[str, int, int]] = []

    def telling(name: str, kind_of: Callable[[dict[str, Any]], str]) -> None:
        sound = getattr(PipelineStage, name)

        def call(stage: Any, number: int, *arguments: Any, **named: Any) -> Any:
            told.append((kind_of(named), stage.stage_index, number))
            return sound(stage, number, *arguments, **named)

        setattr(PipelineStage, name, call)

    telling("forward_one_chunk", lambda named: "FORWARD")
    telling(
        "backward_one_chunk", lambda named: "FULL_BACKWARD" if named.get("full_backward", True) else "BACKWARD_INPUT"
    )
    telling("backward_weight_one_chunk", lambda named: "BACKWARD_WEIGHT")
    result = run_worker(task, world, reporter)
    open_store(task.models_uri).put(f"order/rank-{world.rank}.json", json.dumps(told).encode())
    return result


joined: list[Member] = []
"""That of this process."""


def _remembered(strategy: Strategy) -> Strategy:
    def join(world: World, config: TrainConfig, build: Build, reporter: Reporter) -> Member:
        joined.append(strategy.join(world, config, build, reporter))
        return joined[-1]

    return replace(strategy, join=join)


@cache
def __getattr__(name: str) -> Strategy:
    """`REMEMBERED_HOROVOD` and the like: any strategy of the registry."""
    if not name.startswith("REMEMBERED_"):
        raise AttributeError(name)
    return _remembered(STRATEGIES[name.removeprefix("REMEMBERED_").lower()])


def every_rank_reports_what_it_holds(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """With a `REMEMBERED` strategy of PyTorch: the bytes of its tensors when the loop has ended."""
    result = run_worker(task, world, reporter)
    [member] = joined
    learner: Any = member.learner
    local = learner.layout.local
    held = {
        "parameters": sum(local(each).nbytes for each in (*learner.module.parameters(), *learner.module.buffers())),
        # Those of the last step.
        "gradients": sum(local(each).nbytes for each in learner.own_gradients()),
        "optimizer": sum(array.nbytes for array in learner.arrays(StatePart.OPTIMIZER)),
    }
    open_store(task.models_uri).put(f"held/rank-{world.rank}.json", to_json(held))
    return result


def every_rank_reports_what_a_failure_leaves(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """With a `REMEMBERED` strategy: the weights that a rank has when the loop has raised."""
    try:
        return run_worker(task, world, reporter)
    except TrainingError:
        _finish_checkpoint()
        [member] = joined
        weights = dump_arrays(member.learner.arrays(StatePart.WEIGHTS))
        open_store(task.models_uri).put(f"left/rank-{world.rank}.npz", weights)
        raise


def every_rank_reports_what_it_opens(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """The path of every file that its process opens from here on, as the interpreter sees it."""
    opened: set[str] = set()

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            opened.add(os.path.realpath(os.fsdecode(arguments[0])))

    sys.addaudithook(note)
    result = run_worker(task, world, reporter)
    open_store(task.models_uri).put(f"opened/rank-{world.rank}", "\n".join(sorted(opened)).encode())
    return result


def chief_reports_where_variables_are(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Of the model `counting`, when it has been trained: name -> the device that holds it."""
    from tests.train.models_under_test import counting_models

    result = every_rank_is_held(task, world, reporter)
    [model] = counting_models
    reporter.event("variables", {each.path: each.value.device for each in model.variables})
    return result
