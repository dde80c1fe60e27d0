"""Runs one step of a training with all its ranks, in a folder that is then removed: `shardmill doctor --rehearse`.

Launcher, network, devices, strategy, model, dataset and store meet as they would, which no look at a config can show.
"""

from __future__ import annotations

import secrets
import time

from shardmill.dataset.leases import reading
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.observer import SilentObserver
from shardmill.jobs.process import Terminated, stop_in_order, was_signalled
from shardmill.jobs.reach import REACH, planted, removed_afterwards
from shardmill.words import counted
from train.checkpoints.checkpoint import complete_checkpoints
from train.checkpoints.checkpoint_writer import wait_for_writers
from train.contracts.task import WorkerTask
from train.launching import LAUNCHERS
from train.planning.memory_fit import decided
from train.planning.shard import begun_setup
from train.planning.trainings import training_to_plan
from train.reporting.observer import GlobalStep
from train.strategies.options import silos_of
from train.tree import TrainTree


def rehearse(tree: TrainTree) -> str:
    """Train on the committed dataset until the first step, and leave that in a checkpoint. -> how it went, in words.

    Memory is not measured: a step is one microbatch, unless the config says otherwise.
    Raises what the training would raise, and UsageError for ranks that this process cannot start.
    """
    found = training_to_plan(tree)
    if found.setup.launcher.started_by_others or silos_of(tree.train):
        other = "train.local_sgd.silos" if silos_of(tree.train) else f"train.launcher = {found.setup.config.launcher!r}"
        raise UsageError(
            f"--rehearse with {other}",
            "expected ranks that one command starts on one dataset",
            "remove --rehearse",
        )
    setup, models = begun_setup(found), found.models
    dataset, config = setup.of_dataset, decided(setup.config, 1, to_bfloat16=False)
    watch = _FirstStep()
    with (
        reading(dataset.store, dataset.pin.version, "doctor --rehearse"),
        planted(models) as nonce,
        # The next driver removes it after a day, if this process is killed.
        removed_afterwards(models, f"{REACH}/rehearsal-{secrets.token_hex(6)}") as folder,
    ):
        task = WorkerTask(config, dataset.pin, models.uri, folder, found.choice.model_source_sha256, reach=nonce)
        how_it_ended = _trained_until_stopped(task, tree, watch)
        if next(complete_checkpoints(models, folder), None) is None:
            raise TrainingError("the ranks left no checkpoint", how_it_ended, "check that models.uri is writable")
    ranks = f"{counted(config.num_workers, 'rank')} by {config.launcher}, strategy {config.strategy}"
    return f"{ranks}: first step {watch.seconds:.1f} s after the start, checkpoint written"


def _trained_until_stopped(task: WorkerTask, tree: TrainTree, watch: _FirstStep) -> str:
    """-> the last messages of the ranks as they stopped. A SIGTERM from another process is raised as usual."""
    try:
        LAUNCHERS[task.config.launcher].launch(task, tree.spark, watch)
    except Terminated as stopped:
        if was_signalled() or not watch.seconds:
            raise
        return str(stopped)
    finally:
        # Of a rank in this process: what came later would not be removed.
        wait_for_writers()
    # There was no second step.
    return "the training ended"


class _FirstStep(SilentObserver):
    """A `TrainObserver` that has the ranks stop, as for a SIGTERM, when all have done their first step."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds = 0.0

    def step(self, step: GlobalStep) -> None:
        if not self.seconds:
            self.seconds = time.monotonic() - self._started
            stop_in_order()
