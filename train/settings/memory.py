"""The section `train.memory` of the config: how much memory a rank may use, and how it may save memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class MemoryConfig(Section):
    """How much memory a rank may use for a step, and how it may save memory; see also `accumulation_steps`."""

    budget_bytes: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Memory of the GPU, or of the host, that a rank may use; 0: all of it, shared equally by the host's ranks."""
    activation_checkpointing: Annotated[Literal["off", "on", "auto"], EXECUTION] = "auto"
    """Keep only the inputs of blocks of layers for the backward pass and recompute the rest, which takes less memory
    and more time. `auto`: only if a step does not fit into memory otherwise."""
