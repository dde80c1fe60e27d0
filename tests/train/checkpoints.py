"""A training that was interrupted, with its checkpoints, and the same one undisturbed."""

from __future__ import annotations

from pathlib import Path

from shardmill.stores import open_store
from tests.train.training import MODELS
from train.checkpoint import find_checkpoint

CONFIG = {"model": f"{MODELS}:stateful", "checkpoint_every_steps": 1, "keep_checkpoints": 3}
KILLED_AT = 4


def newest(models: Path) -> Path:
    found = find_checkpoint(open_store(models), "t")
    assert found is not None
    return models / found.path
