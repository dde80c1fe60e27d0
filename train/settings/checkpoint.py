"""The section `train.checkpoint` of the config: which checkpoints are kept."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class CheckpointConfig(Section):
    """Which checkpoints are kept; `checkpoint_every_steps` sets when they are written."""

    keep: Annotated[int, EXECUTION] = Field(default=2, ge=2)
    """Number of newest checkpoints to keep."""
