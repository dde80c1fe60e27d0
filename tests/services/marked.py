"""Servers of tests, and all that they start: known by a mark in their environment, ended together; and free ports."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

MARK = "SHARDMILL_TEST_MARK"
# For JVMs that live for seconds, which gain nothing from a second compiler.
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_END_SECONDS = 20.0


def free_ports(number: int) -> list[int]:
    """As many different ones of loopback, on which nobody listens now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def marked(mark: str) -> dict[int, list[str]]:
    """The arguments of each running process that bears the mark, by process id."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except OSError:
            continue
    return dict(sorted(found.items()))


def end_marked(mark: str) -> None:
    """Kill them all, and what they start meanwhile: containers and Python workers are in groups of their own."""
    deadline = time.monotonic() + _END_SECONDS
    while left := marked(mark):
        assert time.monotonic() < deadline, f"they do not end: {left}"
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
