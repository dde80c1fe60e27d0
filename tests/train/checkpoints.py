"""A training that was interrupted, with its checkpoints, and the same one undisturbed."""

from __future__ import annotations

from pathlib import Path

from shardmill.stores import open_store
from tests.train.training import MODELS
from train.checkpoint import complete_checkpoints

CONFIG = {"model": f"{MODELS}:stateful", "checkpoint_every_steps": 1, "keep_checkpoints": 3}
KILLED_AT = 4


def newest(models: Path) -> Path:
    found = next(complete_checkpoints(open_store(models), "t"))
    return models / found.path
