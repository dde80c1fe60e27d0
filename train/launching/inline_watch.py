"""Watches a rank in the current process: a thread reports a long pause, and ends the process if the pause continues.

The deadlines are those of ranks elsewhere (`train.launching.deadlines`), but for silence: nobody inside can tell it.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from shardmill.jobs.observer import WARNING
from shardmill.values import Cursor
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.launching.activity_clock import ActivityClock, heartbeat_of
from train.launching.deadlines import Deadlines
from train.launching.faults import RankFault, error_of
from train.launching.messages import Hello
from train.reporting.observer import TrainObserver

TICK_SECONDS = 0.2
# For the exception to end what the main thread does; native code may not let it.
GRACE_SECONDS = 30.0
_SIGNAL = signal.SIGUSR2
_DEBUGGERS = {"bdb", "pdb", "debugpy", "pydevd"}


class Stalled(BaseException):
    """Raised in the main thread, wherever it stands. No Exception: a user's code must not take it for its own."""


class InlineWatch:
    """The state of the only rank; `step` and `doing` are called by the training thread."""

    def __init__(self, config: TrainConfig, observer: TrainObserver, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: the clock, in seconds."""
        self.fault: RankFault | None = None
        self._now = now
        self._observer = observer
        self._deadlines = Deadlines(config, now())
        self._clock = ActivityClock(now())
        [self._rank] = self._deadlines.ranks
        self._rank.hello = Hello("rank", 0, socket.gethostname(), os.getpid(), "", "")
        self._rank.is_connected = True
        self._max_tick_seconds = config.watch.silent_seconds / 2
        self._deadlines.restart_clocks(now())

    def step(self, step: Cursor) -> None:
        self._deadlines.progress(self._rank, self._now())
        self._rank.last_step = step

    def doing(self, activity: Activity) -> Activity:
        return self._clock.begin(activity, self._now())

    def watch(self, trains: threading.Thread, is_over: threading.Event) -> None:
        """Watch until the rank finishes or must be ended."""
        ticked_seconds = self._now()
        while not is_over.wait(TICK_SECONDS):
            now = self._now()
            # This process was suspended, or a user is debugging it.
            if now - ticked_seconds > self._max_tick_seconds or _is_in_debugger(trains):
                self._deadlines.restart_clocks(now)
                self._clock.restart(now)
            ticked_seconds = self._rank.seen_seconds = now
            beat = heartbeat_of(self._clock)
            # There is no other rank that it could wait for.
            beat = replace(beat, activity=replace(beat.activity, waits=False))
            self._deadlines.heartbeat(self._rank, beat, now)
            for rank, pause in self._deadlines.paused(now):
                self._observer.event("rank_paused", {"rank": 0, "where": rank.where, WARNING: pause})
            missed = self._deadlines.missed(now)
            if missed:
                self.fault = missed[0]
                signal.pthread_kill(trains.ident or 0, _SIGNAL)
                if not is_over.wait(GRACE_SECONDS):
                    self._end_process(self.fault)
                return

    def _end_process(self, fault: RankFault) -> None:
        # The current stack, for debugging.
        faulthandler.dump_traceback(all_threads=True)
        error = error_of(fault)
        sys.stderr.write(f"ERROR {error.exit_code}: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)


@contextmanager
def watching(watch: InlineWatch) -> Iterator[None]:
    """Inside, `Stalled` is raised if the rank makes no progress for too long.

    Only the main thread can be ended so: in another one nothing is watched.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        yield
        return
    is_over = threading.Event()
    before = signal.signal(_SIGNAL, _raise_stalled)
    threading.Thread(target=watch.watch, args=(thread, is_over), name="inline-watch", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        signal.signal(_SIGNAL, before)


def _raise_stalled(number: int, frame: FrameType | None) -> None:
    raise Stalled


def _is_in_debugger(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
