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
    """Memory for the shuffle windows of one rank, which decides `window_chunks`. The memory that each rank needs is
    checked before anything starts."""
    window_chunks: int = Field(default=0, ge=0)
    """Chunks in the shuffle window of a stream. 0: as many as fit `window_budget_bytes`, at least one; decided when a
    training begins (up to 8 ranks as for one rank with all streams, so that it is the same) and kept when it is resumed
    with another number of ranks."""
