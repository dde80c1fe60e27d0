"""Worker functions without TensorFlow, for the tests of the launchers: ranks that end in every way there is."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from shardmill.errors import IntegrityError
from shardmill.jobs.process import Terminated
from shardmill.values import Cursor, DatasetPin
from train.config import TrainConfig
from train.contracts.activities import Activity, during, waiting
from train.contracts.task import WorkerTask
from train.contracts.values import ModelIdentity, Reporter, StepReport, TimeShares, TrainResult
from train.contracts.world import World
from train.settings import WatchConfig
from train.strategies.options import LocalSgdOptions

NUM_STEPS = 4


def well(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """Reports NUM_STEPS steps with two sample ids each, prints, and finishes."""
    reporter.event("resumed", {"step": 0})
    print(f"hello from {world.rank}", flush=True)
    os.write(2, b"no end of a line")
    for step in range(NUM_STEPS):
        sample_ids = tuple(f"{step:08x}{world.rank * 2 + row:08x}" for row in range(2))
        reporter.step(StepReport(world.rank, 0, step, NUM_STEPS, (0.5).hex(), sample_ids))
    return result_of(task, world)


def result_of(task: WorkerTask, world: World) -> TrainResult:
    return TrainResult(dataset=task.dataset, training_dir=task.training_dir, exported="last", weights_epoch=0,
                       checkpoint="", last_checkpoint="", continued_from="", model=ModelIdentity("", "0" * 64),
                       strategy=task.config.strategy, world_size=world.world_size, num_epochs=1, num_steps=NUM_STEPS,
                       seconds=0.0, images_per_second=0.0, time_shares=TimeShares(), final_loss_hex=(0.5).hex(),
                       weights_sha256=f"{world.rank:064x}", stopped_early=False, resumed_from=Cursor(0, 0), history=(),
                       evaluation=None, placement=world.placement)  # fmt: skip


def watched_task(
    num_workers: int, strategy: str = "horovod", *, silos: tuple[str, ...] = (), **watch: float
) -> WorkerTask:
    config = TrainConfig(num_workers=num_workers, strategy=strategy, launcher="local", watch=WatchConfig(**watch))
    config, pin = config.with_options(LocalSgdOptions(silos=silos)), DatasetPin("/nowhere", 1, "0" * 64)
    return WorkerTask(config, pin, "/nowhere", "trainings/test", "")


def reports_its_devices(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """What a framework would see that this process imported now."""
    reporter.event("sees", {"devices": os.environ["CUDA_VISIBLE_DEVICES"]})
    return well(task, world, reporter)


def reports_variables_with_token(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """What user code that prints its environment would tell."""
    told = [name for name in os.environ if "TOKEN" in name]
    reporter.event(" ".join(told) or "no token", {})
    return well(task, world, reporter)


def raises_on_last_rank(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    _one_step(world, reporter)
    if world.rank == world.world_size - 1:
        raise ValueError("the third layer\nexploded")
    _survive()


def leaves(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """What a user's own code may do: success, as the shell sees it, and nothing is trained."""
    sys.exit(0)


def finds_altered_shard(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    if world.rank == world.world_size - 1:
        raise IntegrityError("shard a.parquet was altered", "expected CRC 1", "run verify")
    _survive()


def is_killed(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    _one_step(world, reporter)
    if world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _survive()


def is_stopped(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    _one_step(world, reporter)
    if world.rank == world.world_size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    reporter.doing(waiting("an allreduce"))
    time.sleep(600)
    raise AssertionError


def hangs(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """The last rank stands still in its own work; its heartbeats go on, and the others wait for it."""
    _one_step(world, reporter)
    if world.rank == world.world_size - 1:
        reporter.doing(Activity())
    else:
        reporter.doing(waiting("an allreduce"))
    time.sleep(600)
    raise AssertionError


def sleeps_in_a_step(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """As `hangs`, after many steps: how long one takes is known."""
    step = Activity("a step", repeats=True)
    _one_step(world, reporter)
    for _ in range(30):
        with during(reporter, step):
            time.sleep(0.01)
    reporter.doing(step if world.rank == world.world_size - 1 else waiting("an allreduce"))
    time.sleep(600)
    raise AssertionError


def plods(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """The last rank's second step takes 0.4 of `train.watch.progress_timeout_seconds`, its third one 1.5 times it.

    The driver allows ten times the longest pause so far. A heartbeat may divide the second step's pause into two; the
    longer one is 0.2 of the limit at least, so twice the limit is allowed, whenever the heartbeats come. What a busy
    machine adds to either is less than what is left, half of the limit.
    """
    limit_seconds = task.config.watch.progress_timeout_seconds
    for step in range(NUM_STEPS):
        if world.rank == world.world_size - 1:
            time.sleep(limit_seconds * {1: 0.4, 2: 1.5}.get(step, 0.0))
        reporter.step(StepReport(world.rank, 0, step, NUM_STEPS, (0.5).hex()))
    return result_of(task, world)


def exits_early(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    if world.rank == world.world_size - 1:
        os.write(2, b"no licence found\n")
        os._exit(7)
    _survive()


def sleeps(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    _one_step(world, reporter)
    time.sleep(600)
    raise AssertionError


def stops_in_order(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """When it may begin no other step, the way to its end takes a moment, as a checkpoint does."""
    _one_step(world, reporter)
    while world.may_begin(1):
        time.sleep(0.02)
    time.sleep(1.0)
    raise Terminated("stopped in order")


def fails_when_stopped(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    _one_step(world, reporter)
    while world.may_begin(1):
        time.sleep(0.02)
    raise ValueError("no room for the checkpoint")


def is_slow(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """The last rank does nothing for longer than `train.watch.silent_seconds`, but lives."""
    if world.rank == world.world_size - 1:
        time.sleep(task.config.watch.silent_seconds + 2)
    return well(task, world, reporter)


def _one_step(world: World, reporter: Reporter) -> None:
    reporter.step(StepReport(world.rank, 0, 0, NUM_STEPS, (0.5).hex()))
    time.sleep(0.3)


def _survive() -> NoReturn:
    """What Horovod does to the ranks that are left: they fail a moment later, and say nothing of the cause."""
    time.sleep(0.1)
    raise RuntimeError("HorovodInternalError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer")
