"""How a process is asked to end: Ctrl-C and SIGTERM unwind the stack, and outrank whatever fails on the way down.

A signal to a whole process group ends Spark's JVM before us. What then fails in our own clean-up (a connection that is
refused) says nothing of why this process ends; that it was asked to does.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType

_received: list[BaseException] = []


class Terminated(BaseException):
    """SIGTERM: a scheduler wants this process to end."""

    exit_code = 143

    def __init__(self) -> None:
        super().__init__("terminated by SIGTERM")


def raise_on_signals() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that nothing is left half-done; and remember both."""

    def terminate(signal_number: int, frame: FrameType | None) -> None:
        _received.append(Terminated())
        raise _received[0]

    def interrupt(signal_number: int, frame: FrameType | None) -> None:
        _received.append(KeyboardInterrupt())
        raise _received[0]

    if threading.current_thread() is threading.main_thread():
        _received.clear()
        signal.signal(signal.SIGTERM, terminate)
        # Whoever was started with Ctrl-C ignored (in the background, by nohup) goes on ignoring it.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, interrupt)


def why_ended(error: BaseException) -> BaseException:
    """The first signal that asked this process to end, if there was one; else `error`."""
    return _received[0] if _received else error
