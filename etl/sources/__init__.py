"""Sources: how inputs are listed; a new kind is a module with a listing function and an entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from etl.sources.listing import Listing

SOURCES: Registry[Callable[[SourceConfig, int], Listing]] = Registry(
    "source.kind",
    {
        "folders": Entry(
            "etl.sources.folders:list_folders", "one folder per class, optionally inside train/, val/, test/"
        )
    },
    takes_own=True,
)
