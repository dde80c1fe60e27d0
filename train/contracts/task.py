"""The task that the driver sends to every rank; it crosses process and machine borders as JSON."""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.values import DatasetPin, Nonce
from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class WorkerTask:
    """All input of a rank."""

    config: TrainConfig
    dataset: DatasetPin
    models_uri: str
    training_dir: str
    """Relative to `models_uri`: where this training keeps its checkpoints and its result."""
    model_source_sha256: str
    """Digest found by the driver; a rank that finds another source must not train."""
    continues: str = ""
    """Relative to `models_uri`: the checkpoint of another training (a shorter one, or one that `--allow-change`
    accepts) from which this one continues; empty if there is none."""
    allowed: tuple[str, ...] = ()
    """Settings of `train.*` in which that one may differ."""
    reach: Nonce | None = None
    """Nonce that the driver wrote into `models_uri`; every rank reads it back before it works."""
