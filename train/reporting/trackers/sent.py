"""A tracker at a server: a thread sends the numbers, so that a server that is away or slow costs a training a warning
and nothing else."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from shardmill.jobs.observer import FieldValue
from train.reporting.observer import GlobalStep
from train.reporting.scalars import Scalars, of_event, of_step
from train.reporting.trackers.tracker import TrackedRun

FLUSH_SECONDS = 2.0
MAX_PAUSE_SECONDS = 60.0
CLOSE_SECONDS = 15.0
MAX_SENT = 100
"""Steps and epochs of one call of `send`."""
MAX_WAITING = 40_000
"""Steps and epochs that are kept for a server that is away: some 40 MB."""


class Refusal(Exception):
    """Raised by `send` for what the server would refuse again: these numbers are dropped."""


class SentTracker(ABC):
    """A subclass is made with a `TrackedRun`, and has `begin`, `send` and `end`.

    They run in a thread of the driver and may raise anything: what failed is tried again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.run_id = ""
        """At the server; `begin` sets it."""
        self._is_begun = False
        self._is_finished = False
        self._lock = threading.Lock()
        self._waiting: list[Scalars] = []
        self._num_lost = 0
        self._problem = ""
        self._is_reported = False
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def begin(self) -> None:
        """Find the run that an earlier attempt began at the server, or make a new one."""

    @abstractmethod
    def send(self, scalars: Sequence[Scalars]) -> None:
        """Send these numbers, in order. Raises `Refusal` if they are what is wrong."""

    @abstractmethod
    def end(self, *, is_finished: bool) -> None:
        """Nothing comes after this; `is_finished` if the training ended well."""

    def step(self, step: GlobalStep) -> None:
        if self._thread is None:
            # Not before there is something to tell: a training that is found done makes no run.
            self._thread = threading.Thread(target=self._send_all, name="tracker", daemon=True)
            self._thread.start()
        self._put(of_step(step))

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if scalars := of_event(name, fields):
            self._put(scalars)

    def finish(self) -> None:
        self._is_finished = True

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            # What was ended should end.
            self._thread.join(CLOSE_SECONDS if self._is_finished else CLOSE_SECONDS / 3)
            self._report_problem()
            if num_left := sum(len(each.values) for each in self._waiting) + self._num_lost:
                self.run.warn(f"{num_left} values of metrics did not get there: {self._problem or 'it is slow'}")

    def _put(self, scalars: Scalars) -> None:
        with self._lock:
            self._waiting.append(scalars)
            if (too_many := len(self._waiting) - MAX_WAITING) > 0:
                self._num_lost += sum(len(each.values) for each in self._waiting[:too_many])
                del self._waiting[:too_many]
        self._report_problem()

    def _report_problem(self) -> None:
        """Observers are called by the training's thread alone."""
        if self._problem and not self._is_reported:
            self._is_reported = True
            self.run.warn(f"{self._problem}; the training continues, and sending is tried again")

    def _send_all(self) -> None:
        pause = FLUSH_SECONDS
        while True:
            is_closing = self._closing.wait(pause)
            try:
                if not self._is_begun:
                    self.begin()
                    self._is_begun = True
                while self._send_some():
                    pass
                if is_closing:
                    self.end(is_finished=self._is_finished)
                    return
                pause = FLUSH_SECONDS
            except Exception as error:  # whatever it is: not the training's concern
                self._problem = str(error)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                if is_closing:
                    if not self._is_begun:
                        return
                    # It was there before: as long as `close` waits for it.
                    time.sleep(FLUSH_SECONDS)

    def _send_some(self) -> bool:
        """-> whether there was anything. What was not sent waits."""
        with self._lock:
            some = self._waiting[:MAX_SENT]
        if not some:
            return False
        try:
            self.send(some)
        except Refusal as error:
            self._num_lost += sum(len(each.values) for each in some)
            self._problem = str(error)
        sent = set(map(id, some))
        with self._lock:
            # Some may have been dropped meanwhile, because too many were waiting.
            self._waiting = [each for each in self._waiting if id(each) not in sent]
        return True
