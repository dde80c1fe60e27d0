"""Decides when a storage request is retried, and counts retries for the run's record of each stage."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tenacity import RetryCallState

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 8.0
# Not the process's own generator, as tenacity's waits: Keras takes the seeds of a model's first weights from that.
_jitter = random.SystemRandom()
_lock = threading.Lock()
_num_retried = 0


def pause_seconds(state: RetryCallState) -> float:
    """tenacity's `wait`: anything up to a bound that doubles with each attempt ("full jitter", Brooker, AWS, 2015)."""
    return _jitter.uniform(0, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (state.attempt_number - 1)))


def count_retry() -> None:
    """A request failed in a way that may pass, and is sent again. From any thread."""
    global _num_retried
    with _lock:
        _num_retried += 1


def num_retried() -> int:
    """Requests that this process has sent again so far. HDFS's client repeats its own unseen."""
    return _num_retried
