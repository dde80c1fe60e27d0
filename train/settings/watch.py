"""The section `train.watch` of the config: how long the driver waits for ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class WatchConfig(Section):
    """Time limits for ranks: to start, in a step, and to stop."""

    silent_seconds: Annotated[float, EXECUTION] = Field(default=55.0, gt=0)
    """A rank counts as lost, and the job ends, after this time without heartbeats. The same applies to this time
    without progress in a repeated activity (a step, reading a batch), if it is also 10 times the longest so far;
    otherwise a warning names the rank."""
    progress_timeout_seconds: Annotated[float, EXECUTION] = Field(default=600.0, gt=0)
    """The limit for other activities; before its first step a rank gets `start_timeout_seconds` more. If this limit is
    lower than `silent_seconds`, or than the time that a store may take for a batch, it applies to these, too."""
    start_timeout_seconds: Annotated[float, EXECUTION] = Field(default=300.0, gt=0)
    """All ranks must have started within this time."""
    stop_timeout_seconds: Annotated[float, EXECUTION] = Field(default=25.0, gt=0)
    """After SIGTERM, ranks are killed if they have not finished their step and written a checkpoint within this time.
    Keep it below the scheduler's own limit (30 s on Kubernetes)."""
