"""The settings of the launcher `attach`: the section `[train.attach]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.setting_kinds import EXECUTION
from train.written_forms import Host


class AttachOptions(Section):
    """Settings of the launcher `attach`."""

    host: Annotated[Host, EXECUTION] = ""
    """Where the others reach rank 0; empty: what the starter says (MASTER_ADDR, SLURM's first node)."""
    port: Annotated[int, EXECUTION] = Field(default=29610, ge=1, le=65535)
    """On which port."""
