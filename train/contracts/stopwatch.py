"""Time cut into laps without gaps, so that the parts of a training's time add up to all of it."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs from its construction."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last call."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds
