"""A reader beside a writer that is killed: it looks again and again, and never sees anything but a whole version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

POLLS_PER_SECOND = 20
_LEAST_POLLS = 3


@contextmanager
def polled(look: Callable[[], None]) -> Iterator[None]:
    """Inside, `look` is called 20 times a second, or without a pause where the machine is too slow for that.

    At the end it must have succeeded each time, and once more after what happened inside.
    """
    ended, problems, num_polls = threading.Event(), [], 0

    def poll() -> None:
        nonlocal num_polls
        next_at = time.monotonic()
        # A process that stood still meanwhile has looked too seldom, and still does.
        while not ended.wait(max(0.0, next_at - time.monotonic())) or num_polls < _LEAST_POLLS:
            next_at += 1 / POLLS_PER_SECOND
            try:
                look()
                num_polls += 1
            except BaseException as error:  # whatever it is, the test must show it
                problems.append(error)
                return

    look()
    poller, began = threading.Thread(target=poll), time.monotonic()
    poller.start()
    try:
        yield
    finally:
        ended.set()
        poller.join()
    print(f"{num_polls} polls in {time.monotonic() - began:.1f} s")
    assert not problems, problems
    look()
