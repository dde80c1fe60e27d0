"""A training that was interrupted, with its checkpoints, and the same one undisturbed."""

from __future__ import annotations

from pathlib import Path

from shardmill.stores import open_store
from tests.train.training import MODELS
from train.checkpoint import complete_checkpoints

CONFIG = {"model": f"{MODELS}:stateful", "checkpoint_every_steps": 1, "keep_checkpoints": 3}
KILLED_AT = 4


class OneRank:
    """Who writes a checkpoint alone."""

    rank = 0
    world_size = 1

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def newest(models: Path) -> Path:
    found = next(complete_checkpoints(open_store(models), "t"))
    return models / found.path
