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
    """The checkpoint from which this training continues, relative to `models_uri`: that of a shorter training, or of
    one that `--allow-change` accepts. Empty if there is none."""
    allowed: tuple[str, ...] = ()
    """Settings of `train.*` in which that one may differ."""
    reach: Nonce | None = None
    """Nonce that the driver wrote into `models_uri`; every rank reads it back before it works."""
