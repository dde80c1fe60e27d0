"""The settings of the launcher `attach`: the section `[train.attach]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION
from train.settings.written_forms import Host


class AttachOptions(Section):
    """Settings of the launcher `attach`."""

    host: Annotated[Host, EXECUTION] = ""
    """Host name or address of rank 0 for the other ranks; empty: from the starter (MASTER_ADDR, SLURM's first node)."""
    port: Annotated[int, EXECUTION] = Field(default=29610, ge=1, le=65535)
    """Port of rank 0."""
