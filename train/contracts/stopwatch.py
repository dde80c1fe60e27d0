"""Time cut into laps without gaps, so that the parts of a training's time add up to all of it."""

from __future__ import annotations

import time
from collections.abc import Callable


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
