"""The section `train.cache` of the config: where ranks keep chunks of a remote dataset."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings.kinds import EXECUTION


class CacheConfig(Section):
    """Where ranks keep chunks of a remote dataset."""

    dir: Annotated[str, EXECUTION] = ""
    """Folder on a local disk of each host, shared by all ranks there; empty: no cache. Not used for a local dataset."""
    limit_bytes: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Bytes that the folder may take on each host, at least one shuffle window; 0: half of what its disk has free."""
