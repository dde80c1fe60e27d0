"""The section `train.reading` of the config: threads and memory for a rank's input."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class ReadingConfig(Section):
    """Threads and memory of each rank for its input."""

    threads: Annotated[int, EXECUTION] = Field(default=2, ge=1)
    """Threads in each rank that read, verify, decode and augment."""
    prefetch_bytes: Annotated[int, EXECUTION] = Field(default=64_000_000, ge=1)
    """Maximum size of the queue of decoded batches in each rank."""
    window_budget_bytes: int = Field(default=256_000_000, ge=1)
    """Memory for the shuffle windows of one rank. It decides the size of a window together with `num_streams` (at least
    one chunk), independently of `num_workers`. The memory that each rank needs is checked before anything starts."""
