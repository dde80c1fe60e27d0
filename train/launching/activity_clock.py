"""Measures how long a rank's repeated activities take, for its heartbeats; the clock is an argument."""

from __future__ import annotations

from train.contracts.activities import Activity
from train.launching.messages import Heartbeat, Timed

UNTIMED = 4
"""Number of first repetitions of an activity that are not timed, because frameworks trace and compile in them."""


class ActivityClock:
    """This rank's current activity and its times. One thread at a time begins activities; any thread may read."""

    def __init__(self, now: float) -> None:
        self.num_begun = 0
        self.current = Activity()
        self._began_seconds = now
        self._timed: dict[str, Timed] = {}

    def begin(self, activity: Activity, now: float) -> Activity:
        """-> the one that has ended with it."""
        ended, seconds = self.current, now - self._began_seconds
        if ended.repeats:
            before = self._timed.get(ended.what, Timed(ended.what, -UNTIMED))
            longest_seconds = max(before.longest_seconds, seconds) if before.num_finished >= 0 else 0.0
            # Waiting for other ranks interrupts it: a step with a hundred collectives is one step.
            num_finished = before.num_finished + (not activity.waits)
            # Another one, not the same one changed: a thread may be reading that.
            self._timed = {**self._timed, ended.what: Timed(ended.what, num_finished, longest_seconds)}
        self.current, self._began_seconds = activity, now
        self.num_begun += 1
        return ended

    def restart(self, now: float) -> None:
        """Restart the time of the current activity, because the time so far was not representative."""
        self._began_seconds = now

    @property
    def timed(self) -> tuple[Timed, ...]:
        return tuple(self._timed.values())


def heartbeat_of(clock: ActivityClock) -> Heartbeat:
    """Return a heartbeat from a rank's clock, from any thread."""
    current, timed = clock.current, clock.timed
    # Read last: an activity that has begun meanwhile must not be judged by the pause before it.
    return Heartbeat(clock.num_begun, current, timed)
