"""Runs a command and measures the whole process: seconds, CPU time and memory, including children (Linux only)."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2
_ORPHAN_SECONDS = 10.0
_MEGABYTE = 1e6


@dataclass(frozen=True)
class Usage:
    """What one run of a command took."""

    wall_seconds: float
    cpu_seconds: float
    """User and system time of the process and of all that it started."""
    worker_peak_mb: float
    """The largest resident memory of a worker: of any process but the first one and a JVM, if there are others."""
    total_peak_mb: float
    """The largest sum of resident memory at one moment; pages that processes share count for each of them."""
    output: str
    """Its standard output."""


class CommandFailed(Exception):
    """The command ended with another status than 0, or was killed at the time limit; the message is one line."""


@dataclass
class _Peaks:
    """The memory of a process tree, polled."""

    root: int
    total_bytes: int = 0
    by_process: dict[int, int] = field(default_factory=dict)
    jvms: set[int] = field(default_factory=set)

    def poll(self) -> None:
        total = 0
        for process in _descendants(self.root):
            try:
                status = Path(f"/proc/{process}/status").read_text()
            except OSError:
                continue  # it has ended meanwhile
            fields = dict(line.split(":", 1) for line in status.splitlines())
            if "VmRSS" not in fields:
                continue  # a zombie
            total += 1024 * int(fields["VmRSS"].split()[0])
            self.by_process[process] = 1024 * int(fields["VmHWM"].split()[0])
            if fields["Name"].strip() == "java":
                self.jvms.add(process)
        self.total_bytes = max(self.total_bytes, total)

    @property
    def worker_bytes(self) -> int:
        workers = self.by_process.keys() - self.jvms - {self.root}
        return max((self.by_process[process] for process in workers or self.by_process), default=0)


def run_measured(command: Sequence[str], environment: Mapping[str, str], time_limit: float, log: Path) -> Usage:
    """Run the command to its end; what it writes to standard error goes into `log`. Raises CommandFailed."""
    # Orphans (Spark's Python daemon) become children of ours, so that their CPU time is counted as well.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    cpu_before, started = _children_cpu_seconds(), time.perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    peaks, ended = _Peaks(process.pid), threading.Event()
    poller = threading.Thread(target=_poll_until, args=(peaks, ended))
    poller.start()
    try:
        output, _ = process.communicate(timeout=time_limit)
        wall_seconds = time.perf_counter() - started
    except subprocess.TimeoutExpired:
        raise CommandFailed(f"killed after {time_limit:.0f} s; see {log}") from None
    finally:
        ended.set()
        poller.join()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        _reap_orphans()
    if process.returncode != 0:
        raise CommandFailed(f"exit status {process.returncode}: {_last_line(log)}; see {log}")
    return Usage(
        wall_seconds=wall_seconds,
        cpu_seconds=_children_cpu_seconds() - cpu_before,
        worker_peak_mb=peaks.worker_bytes / _MEGABYTE,
        total_peak_mb=peaks.total_bytes / _MEGABYTE,
        output=output.decode(errors="replace"),
    )


def _poll_until(peaks: _Peaks, ended: threading.Event) -> None:
    while not ended.wait(_POLL_SECONDS):
        peaks.poll()


def _reap_orphans() -> None:
    """Wait for what the command left running, and end what does not end by itself."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if process:
            continue
        if time.monotonic() > deadline:
            for orphan in _descendants(os.getpid())[1:]:
                os.kill(orphan, signal.SIGKILL)
        time.sleep(0.05)


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _descendants(root: int) -> list[int]:
    """A process and all that it started, as far as they still run."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command's name comes second, in parentheses, and may hold anything.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended meanwhile
        children[parent].append(int(stat.parent.name))
    found = [root]
    for process in found:
        found += children[process]
    return found


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")
