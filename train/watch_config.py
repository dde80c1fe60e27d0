"""The section `train.watch` of the config: how long the driver waits for ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.setting_kinds import EXECUTION


class WatchConfig(Section):
    """How long ranks may take, to start, in a step, and to stop."""

    silent_seconds: Annotated[float, EXECUTION] = Field(default=55.0, gt=0)
    """A rank is lost, and the job ends, after this time without heartbeats, or without progress in a repeated activity
    (a step, reading a batch) if that is also 10 times its longest so far. Else the rank is only named."""
    progress_timeout_seconds: Annotated[float, EXECUTION] = Field(default=600.0, gt=0)
    """The same for other activities; before its first step a rank gets `start_timeout_seconds` in addition. If it is
    less than `silent_seconds`, or than the time a store may take for a batch, it applies there, too."""
    start_timeout_seconds: Annotated[float, EXECUTION] = Field(default=300.0, gt=0)
    """All ranks must have started within this time."""
    stop_timeout_seconds: Annotated[float, EXECUTION] = Field(default=25.0, gt=0)
    """On SIGTERM: how long the ranks may take to end their step and write a checkpoint before they are killed. Keep it
    below the scheduler's own limit (30 s on Kubernetes)."""
