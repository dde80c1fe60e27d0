"""Servers of tests, and all that they start: known by a mark in their environment, ended together; and their ports."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

MARK = "SHARDMILL_TEST_MARK"
# For JVMs that live for seconds, which gain nothing from a second compiler.
QUICK_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_END_SECONDS = 120.0


# Below the ports that Linux hands out by itself (net.ipv4.ip_local_port_range): no `connect`, and no `bind` to port 0,
# takes one before its server does.
_PORTS = range(20_000, 32_768)
_reserved: list[socket.socket] = []


def free_ports(number: int) -> list[int]:
    """As many different ones on which nobody listens, which no other process of tests is given while this one lives."""
    found: list[int] = []
    for port in _PORTS:
        if len(found) < number and _reserve(port):
            found.append(port)
    assert len(found) == number, f"{number} free ports below {_PORTS.stop}"
    return found


def _reserve(port: int) -> bool:
    """By a name in the kernel's abstract namespace, which is that of the network and goes with this process."""
    name, probe = socket.socket(socket.AF_UNIX), socket.socket()
    try:
        name.bind(f"\0shardmill test port {port}")
        _reserved.append(name)
        probe.bind(("", port))
    except OSError:
        return False
    finally:
        probe.close()
    return True


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
