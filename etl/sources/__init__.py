"""Sources: how inputs are listed; a new kind is a module with a `list_sources` and an entry here."""

from __future__ import annotations

from collections.abc import Callable

from etl.sources.folders import list_folders
from etl.sources.listing import Listing

SOURCES: dict[str, Callable[[str, int], Listing]] = {"folders": list_folders}
