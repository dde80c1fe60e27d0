"""A training that was interrupted, with its checkpoints, and the same one undisturbed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shardmill.errors import StorageError
from shardmill.jobs.observer import SilentObserver
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.train.training import ONE_LAYER
from train.checkpoints.arrays import WEIGHTS
from train.checkpoints.checkpoint import CheckpointFolder, TrainingIdentity, complete_checkpoints
from train.checkpoints.checkpoint_writer import CheckpointWriter, Moment
from train.contracts.activities import Activity
from train.contracts.values import Progress

CONFIG = {"model": ONE_LAYER, "checkpoint_every_steps": 1, "checkpoint": {"keep": 3}}
KILLED_AT = 4


class OneRank:
    """Who writes a checkpoint alone."""

    rank = 0
    world_size = 1

    def state_files(self) -> dict[str, list[np.ndarray]]:
        return {WEIGHTS: [np.zeros(3, np.float32)]}


class Silent(SilentObserver):
    """A reporter that records nothing."""

    def step(self, report: object) -> None: ...

    def doing(self, activity: Activity) -> Activity:
        return activity


class FullStore(LocalStore):
    """Without room for files of these names, for now."""

    full_for: frozenset[str] = frozenset()

    def put(self, path: str, data: bytes) -> None:
        if path.rpartition("/")[2] in self.full_for:
            raise StorageError("no room", "expected some", "make some")
        super().put(path, data)


def write_checkpoint(folder: CheckpointFolder, step: int, identity: TrainingIdentity, progress: Progress) -> None:
    """One of a training of one rank, with one small file."""
    with CheckpointWriter(folder, OneRank(), Silent()) as writer:
        writer.begin(Moment(folder.path_of(step), writer.copy_state(), identity, progress, step, world_size=1))
        written = writer.take()
    assert written is not None and not written.problem


def newest(models: Path) -> Path:
    found = next(complete_checkpoints(open_store(models), "t"))
    return models / found.path
