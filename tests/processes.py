"""Work in a process of its own, and what the kernel says of other processes."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_own_process(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For Horovod, which a rank starts once in its life: a second start in one process has crashed it."""
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args, **kwargs).result()


def children_of(pid: int) -> set[int]:
    """Those that its main thread has started, zombies included."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def children_of_all_threads(pid: int) -> set[int]:
    return {int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def peak_bytes(pid: int) -> int:
    """The most memory that it has held at once so far; 0 for a zombie."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(peak[1]) * 1024 if peak else 0
