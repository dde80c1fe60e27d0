"""Base of trackers that send to a server from a thread, so that a slow or unreachable server costs a warning only."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from shardmill.jobs.observer import FieldValue
from train.reporting.observer import GlobalStep, Scalars, of_event, of_step
from train.reporting.trackers.tracker import TrackedRun

FLUSH_SECONDS = 2.0
MAX_PAUSE_SECONDS = 60.0
CLOSE_SECONDS = 15.0
MAX_SENT = 100
"""Steps and epochs of one call of `send`."""
MAX_WAITING = 40_000
"""Steps and epochs that are kept for a server that is away: some 40 MB."""
SLOW = "the server is slow or does not respond"


class Refusal(Exception):
    """Raised by `send` for what the server would refuse again: these numbers are dropped."""


class SentTracker(ABC):
    """A subclass is made with a `TrackedRun`, and has `begin`, `send` and `end`.

    They run in a thread of the driver and may raise anything: what failed is tried again.
    """

    methods_to_define: ClassVar = {"begin": (), "send": ("scalars",), "end": ("is_finished=",)}
    """Methods to define, with their arguments, for guarded.py."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.run_id = ""
        """Id at the server; set by `begin`."""
        self._is_begun = False
        self._is_finished = False
        self._is_warned = False
        self._lock = threading.Lock()
        """RankState by either thread for what follows."""
        self._waiting: list[Scalars] = []
        self._num_lost = 0
        self._cause_of_loss = ""
        self._failing = ""
        """Why the last call failed; empty if it did not."""
        self._to_warn = ""
        """The first that went wrong."""
        self._is_ended = False
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
        """End the run; `is_finished` if the training ended well."""

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
            if what_is_missing := self._what_is_missing():
                self.run.warn(what_is_missing)

    def _put(self, scalars: Scalars) -> None:
        with self._lock:
            self._waiting.append(scalars)
            if (too_many := len(self._waiting) - MAX_WAITING) > 0:
                self._lose(self._waiting[:too_many], self._failing or SLOW)
                del self._waiting[:too_many]
            to_warn = self._to_warn
        # Observers are called by the training's thread alone.
        if to_warn and not self._is_warned:
            self._is_warned = True
            self.run.warn(to_warn)

    def _what_is_missing(self) -> str:
        """At the end; empty if the server has been told all."""
        with self._lock:
            why = (self._failing or SLOW) if self._waiting or not self._num_lost else self._cause_of_loss
            if num_missing := sum(len(each.values) for each in self._waiting) + self._num_lost:
                return f"{num_missing} metric values were not delivered: {why}"
            return "" if self._is_ended else f"all values were delivered, but not the end of the training: {why}"

    def _lose(self, scalars: Sequence[Scalars], why: str) -> None:
        self._num_lost += sum(len(each.values) for each in scalars)
        self._cause_of_loss = why

    def _send_all(self) -> None:
        pause = FLUSH_SECONDS
        while True:
            is_closing = self._closing.wait(pause)
            try:
                if not self._is_begun:
                    self.begin()
                    self._is_begun = True
                    with self._lock:
                        self._failing = ""
                while self._send_some():
                    pass
                if is_closing:
                    self.end(is_finished=self._is_finished)
                    with self._lock:
                        self._is_ended = True
                    return
                pause = FLUSH_SECONDS
            except (Exception, SystemExit) as error:  # whatever it is: not the training's concern
                with self._lock:
                    self._failing = _words(error)
                    self._to_warn = self._to_warn or f"{self._failing}; the training continues, and sending is retried"
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
        refused = ""
        try:
            self.send(some)
        except Refusal as error:
            refused = _words(error)
        sent = set(map(id, some))
        with self._lock:
            self._failing = ""
            if refused:
                self._lose([each for each in self._waiting if id(each) in sent], refused)
                self._to_warn = self._to_warn or f"{refused}; the training continues without these values"
            # Some may have been dropped meanwhile, because too many were waiting.
            self._waiting = [each for each in self._waiting if id(each) not in sent]
        return True


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
