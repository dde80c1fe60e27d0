"""The section `train.watch` of the config: how long the driver waits for ranks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.setting_kinds import EXECUTION


class WatchConfig(Section):
    """How long ranks may take, to start, in a step, and to stop."""

    silent_seconds: Annotated[float, EXECUTION] = Field(default=55.0, gt=0)
    """A rank is lost, and the job ends, after so long without heartbeats, or in what ranks repeat: a step, reading a
    batch (and 10 times the longest so far, a straggler is spared). Elsewhere one without progress is named."""
    progress_timeout_seconds: Annotated[float, EXECUTION] = Field(default=600.0, gt=0)
    """Elsewhere a rank without progress has this long (likewise), and before its first step `start_timeout_seconds`
    as well. If it is less than `silent_seconds`, or than what a store may take for a batch, it counts there, too."""
    start_timeout_seconds: Annotated[float, EXECUTION] = Field(default=300.0, gt=0)
    """All ranks must have started within this time."""
    stop_timeout_seconds: Annotated[float, EXECUTION] = Field(default=25.0, gt=0)
    """On SIGTERM: how long the ranks may take to end their step and write a checkpoint, before they are ended as they
    are. Less than what a scheduler waits before it kills (30 s on Kubernetes)."""
