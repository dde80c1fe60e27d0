"""The activities of a rank that its heartbeats report; each has a time limit. And time cut into laps without gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from shardmill.storage import Store


Item = TypeVar("Item")

MARGIN_SECONDS = 30.0
SLOW_BYTES_PER_SECOND = 10e6


@dataclass(frozen=True, slots=True)
class Activity:
    """One thing that the thread which trains does, or waits for; it or the framework that it has called says so."""

    what: str = "its own work"
    """Name for people; activities of one name are timed together."""
    waits: bool = False
    """Whether it ends only when the other ranks arrive, too."""
    repeats: bool = False
    """Whether it repeats, so that its past times predict how long it may take."""
    may_take_seconds: float = 0.0
    """Minimum time limit, even if it was fast before."""


class ReportsActivity(Protocol):
    """The part of a rank's `Reporter` that says what the rank does now."""

    def doing(self, activity: Activity) -> Activity:
        """This rank has come further and now does that. -> what it did before (`during` returns to it).

        Costs nothing, so call it often: a rank that neither calls it nor reports a step for long is said to hang.
        """
        ...


def waiting(what: str) -> Activity:
    """The activity of waiting for other ranks."""
    return Activity(what, waits=True)


def reading(what: str, store: Store, most_bytes: int = 0) -> Activity:
    """Waiting for what comes from `store`, which may repeat its requests until its own deadline: that says more.

    `most_bytes`: what has to be there now and then before the next item is, such as a whole shuffle window.
    """
    seconds = store.deadline_seconds
    patience_seconds = seconds + MARGIN_SECONDS if seconds else 0.0
    return Activity(
        what, repeats=seconds is not None, may_take_seconds=patience_seconds + most_bytes / SLOW_BYTES_PER_SECOND
    )


@contextmanager
def during(reporter: ReportsActivity, activity: Activity) -> Iterator[Activity]:
    """Inside, the rank does that, and afterwards again what it did before, which the block is given.

    Not if it fails: what it was doing then is what an error reports.
    """
    before = reporter.doing(activity)
    yield before
    reporter.doing(before)


def each_announced(reporter: ReportsActivity, activity: Activity, items: Iterable[Item]) -> Iterator[Item]:
    """The same items; waiting for each is `activity`."""
    iterator: Iterator[Item] = iter(items)
    end: Any = object()
    while True:
        with during(reporter, activity):
            item = next(iterator, end)
        if item is end:
            return
        yield item


class Stopwatch:
    """Runs from its construction; `now` is its clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()

    def lap(self) -> float:
        """Seconds since the last call."""
        now = self._now()
        seconds, self._last = now - self._last, now
        return seconds
