"""The interface of a tracker: a class that receives every step and event of a run in the driver.

Its methods are called in the training's thread, which waits for them. One that raises is warned of once and called no
more (train/reporting/trackers/guarded.py). One that talks to a server derives from `SentTracker`
(train/reporting/trackers/sent.py), which needs three methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardmill.jobs.line_log import Warn
from shardmill.storage import Store
from train.reporting.run_log import Sink


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The only argument of a tracker's constructor."""

    run_id: str
    settings: Mapping[str, Any]
    """Settings of the section `train` and those below it, by key, as plain values."""
    store: Store
    folder: str
    """Folder of the run in `store`, below which a tracker may write its own files. Later attempts at the run have the
    same folder.
    """
    warn: Warn
    """Call it with one sentence, in the training's thread."""


class Tracker(Sink, Protocol):
    """A sink of `RunLog` that learns whether the training ended well."""

    run_id: str
    """Id of the run at the tracker's server; empty if there is none."""

    def finish(self) -> None:
        """The training has ended well; `close` follows."""
        ...
