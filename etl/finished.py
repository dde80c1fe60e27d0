"""What finished units left, as the driver keeps it: their results in memory, and what they refused in a log on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from etl.listing import Listing
from shardmill.dataset.rejection_log import RejectionLog
from shardmill.dataset.unit_result import UnitResult


class Finished:
    """The results of units, as they come; with all that was refused, by the listing too."""

    def __init__(self, listing: Listing, results: Iterable[UnitResult] = ()) -> None:
        self.results: list[UnitResult] = []
        """Without their rejections."""
        self.rejections = RejectionLog(listing.folder, listing.rejections)
        self._listing = listing  # its folder goes with it
        for result in results:
            self.add(result)

    @property
    def folder(self) -> Path:
        """A local folder that goes with this value."""
        return self._listing.folder

    def add(self, result: UnitResult) -> None:
        """The result of one more unit."""
        self.rejections.add(result.rejections)
        self.results.append(replace(result, rejections=()))
