"""How often this process has asked storage again: stores count it here, and a run's record says it for each stage."""

from __future__ import annotations

import threading

_lock = threading.Lock()
_num_retried = 0


def count_retry() -> None:
    """A request failed in a way that may pass, and is sent again. From any thread."""
    global _num_retried
    with _lock:
        _num_retried += 1


def num_retried() -> int:
    """Requests that this process has sent again so far. HDFS's client repeats its own unseen."""
    return _num_retried
