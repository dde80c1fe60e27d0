"""Work in a process of its own, and what the kernel says of other processes."""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.quick_start.forked import Program, run_forked
from tests.services.marked import marked

P = ParamSpec("P")
T = TypeVar("T")


# What a rank of each backend imports. PyTorch imports its compilers when deterministic algorithms are switched on.
RANK_MODULES = {
    "none": ("train.launching.rank",),
    "keras": ("tensorflow", "train.launching.rank", "train.rank.worker", "train.backends.keras.backend"),
    "torch": (
        "torch", "torch._inductor.config", "train.launching.rank", "train.rank.worker", "train.backends.torch.backend",
    ),
}  # fmt: skip
_OWN_PROCESS_SECONDS = 300


def in_own_process(framework: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(...)` in a process that has imported a backend's framework, and not run anything of it.

    For Horovod, which a rank starts once in its life: a second start in one process has crashed it.
    """
    with tempfile.TemporaryDirectory() as folder:
        call, returned = Path(folder, "call"), Path(folder, "returned")
        call.write_bytes(pickle.dumps((function, args, kwargs)))
        arguments = (function.__name__, str(call), str(returned))
        program = Program("tests.processes:call_and_return", arguments, os.getcwd(), dict(os.environ))
        done = run_forked(RANK_MODULES[framework], program, _OWN_PROCESS_SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr
        return pickle.loads(returned.read_bytes())  # noqa: S301  (ours)


def call_and_return() -> None:
    """The program of that process."""
    call, returned = map(Path, sys.argv[1:])
    function, args, kwargs = pickle.loads(call.read_bytes())  # noqa: S301  (ours)
    returned.write_bytes(pickle.dumps(function(*args, **kwargs)))


def children_of(pid: int) -> set[int]:
    """Those that its main thread has started, zombies included."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def children_of_all_threads(pid: int) -> set[int]:
    return {int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_stopped(pid: int) -> bool:
    """By a signal, until another one lets it go on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:
        return False


def has_loaded(pid: int, name: str) -> bool:
    """Whether it has mapped a file with `name` in its path, such as a package's library."""
    try:
        return name in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def peak_bytes(pid: int) -> int:
    """The most memory that it has held at once so far; 0 for a zombie."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) * 1024 if peak else 0


@contextmanager
def memory_below(most_bytes: int) -> Iterator[None]:
    """What runs inside takes less, even for a moment; what this process held at its earlier peak is no matter."""
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes(os.getpid())
    yield
    grown_bytes = peak_bytes(os.getpid()) - before
    assert grown_bytes < most_bytes, grown_bytes


LOCAL = {"127.0.0.1", "::1"}


@dataclass(frozen=True)
class Listener:
    port: int
    address: str
    is_rank: bool
    is_spark: bool
    """Of Spark's JVM. It has sockets that take one connection, and a job fails if that is a stranger's."""


def listeners(mark: str) -> set[Listener]:
    """Everything on which processes listen that have `mark` in their environment."""
    inodes: dict[str, tuple[bool, bool]] = {}
    for pid, command in marked(mark).items():
        kinds = "train.launching.rank" in command, any("org.apache.spark" in each for each in command)
        # A process or a file that is gone meanwhile is no listener, and must not hide those behind it.
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inodes[re.sub(r"socket:\[(\d+)\]", r"\1", str(link.readlink()))] = kinds
    found = set()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                packed, _, port = fields[1].partition(":")
                # Words of four bytes, each in the machine's order.
                words = bytes.fromhex(packed)
                address = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                readable = socket.inet_ntop(family, address).removeprefix("::ffff:")
                found.add(Listener(int(port, 16), readable, *inodes[fields[9]]))
    return found


def processes_of_session(session: int) -> dict[int, str]:
    """Command lines by process id; one that has ended and that nobody waited for has none.

    Without those that are about to end: a machine may take seconds to end what was killed, and runs nothing of it.
    """
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ProcessLookupError):
            if os.getsid(int(folder.name)) == session and not _is_ending(folder):
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return {pid: line for pid, line in found.items() if line}


def _is_ending(folder: Path) -> bool:
    """Whether SIGKILL waits for it, or it is on its way out (PF_EXITING of Linux's include/linux/sched.h)."""
    waiting = re.findall(r"^S(?:ig|hd)Pnd:\s+(\w+)$", (folder / "status").read_text(), re.MULTILINE)
    flags = int((folder / "stat").read_text().rpartition(")")[2].split()[6])
    return bool(flags & 0x4) or any(int(each, 16) >> (signal.SIGKILL - 1) & 1 for each in waiting)


def hears_all_signals() -> None:
    """For `preexec_fn`: as in a terminal, also if the tests run in the background or below nohup, which ignore some."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
