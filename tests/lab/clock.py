"""A clock that a test sets, for what takes its clock as a parameter."""

from __future__ import annotations

import threading

_START_SECONDS = 60.0


class SetClock:
    """Its time goes on only by `advance`; one thread at a time may wait on it."""

    def __init__(self) -> None:
        self._now = 1_800_000_000.0
        self._wakes = self._now
        self._changed = threading.Condition()

    def now(self) -> float:
        return self._now

    def wait(self, ended: threading.Event, seconds: float) -> bool:
        """As `threading.Event.wait` does, by this clock."""
        with self._changed:
            self._wakes = self._now + seconds
            self._changed.notify_all()
            while self._now < self._wakes and not ended.is_set():
                self._changed.wait(0.01)  # `ended` notifies nobody
        return ended.is_set()

    def advance(self, seconds: float) -> None:
        """Once the other thread waits: what it did when it woke up last is done by then."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._wakes > self._now, _START_SECONDS), "nobody waits on this clock"
            self._now += seconds
            self._changed.notify_all()
