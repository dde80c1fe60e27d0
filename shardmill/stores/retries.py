"""Decides when a storage request is retried, and counts retries for the run's record of each stage."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tenacity import RetryCallState

Value = TypeVar("Value")

CONNECT_SECONDS = 10.0
"""Time for which a server that has never answered this process or its driver is tried: its address may be wrong."""
STALL_OF_DEADLINE = 1 / 8
"""Part of a deadline after which a request without a byte has stalled: early enough for further ones."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 8.0
TELL_AFTER_SECONDS, TELL_EVERY_SECONDS = 5.0, 60.0
"""A request that fails for so long is a warning, one in so many seconds for all requests of the process."""
_log = logging.getLogger(__name__)
# Not the process's own generator, as tenacity's waits: Keras takes the seeds of a model's first weights from that.
_jitter = random.SystemRandom()
_lock = threading.Lock()
_num_retried = 0
_next_warning = 0.0
_has_driver = False


def words_of_error(error: BaseException) -> str:
    """The system's words, without the number."""
    return getattr(error, "strerror", None) or str(error)


def stall_seconds(deadline_seconds: float) -> float:
    """How long a request may wait for a byte; the last one may do so beyond the deadline."""
    return deadline_seconds * STALL_OF_DEADLINE


def patiently(
    request: Callable[[float], Value],
    is_worth_another: Callable[[BaseException | None, float], bool],
    deadline_seconds: float,
    give_up: Callable[[], Value] | None = None,
    words_of: Callable[[BaseException], str] = words_of_error,
) -> Value:
    """The value of `request`, which is called until it succeeds or fails for good, or the deadline comes.

    It receives the deadline, of time.monotonic(). None begins after it; the last may stall beyond it.
    `is_worth_another` receives the error of each call, None after a success, and the seconds since the first call.
    At the deadline `give_up` decides; by default the last error is raised. `words_of`: what a warning says of an error.
    """
    from tenacity import Retrying, stop_before_delay

    tries = Retrying(
        retry=lambda state: is_worth_another(
            state.outcome.exception() if state.outcome else None, state.seconds_since_start or 0.0
        ),
        wait=_pause_seconds,
        stop=stop_before_delay(deadline_seconds),
        before_sleep=partial(_count_and_tell, deadline_seconds, words_of),
        retry_error_callback=(lambda state: give_up()) if give_up else None,
        reraise=True,
    )
    return tries(request, time.monotonic() + deadline_seconds)


@dataclass
class FirstAnswer:
    """Tracks whether a server has ever answered this process; until then it is retried for CONNECT_SECONDS only."""

    has_come: bool = False
    is_given_up: bool = False

    def is_awaited(self, seconds: float) -> bool:
        """Whether to retry a refused connection, `seconds` after the first attempt."""
        if self.has_come or has_driver():
            return True
        # Once: what comes after it, to clean up, is not to wait as long again.
        self.is_given_up |= seconds >= CONNECT_SECONDS
        return not self.is_given_up


def _pause_seconds(state: RetryCallState) -> float:
    """tenacity's `wait`: anything up to a bound that doubles with each attempt ("full jitter", Brooker, AWS, 2015)."""
    return _jitter.uniform(0, min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (state.attempt_number - 1)))


def _count_and_tell(deadline_seconds: float, words_of: Callable[[BaseException], str], state: RetryCallState) -> None:
    """tenacity's `before_sleep`: count the retry, and warn if the request has failed for TELL_AFTER_SECONDS."""
    global _next_warning
    count_retry()
    seconds, now = state.seconds_since_start or 0.0, time.monotonic()
    error = state.outcome.exception() if state.outcome else None
    if seconds < TELL_AFTER_SECONDS or error is None:
        return
    with _lock:
        if now < _next_warning:
            return
        _next_warning = now + TELL_EVERY_SECONDS
    _log.warning(
        "a request to storage has failed for %.0f s, and is repeated for up to %.0f s: %s",
        *(seconds, deadline_seconds, words_of(error)),
    )


def count_retry() -> None:
    """A request failed in a way that may pass, and is sent again. From any thread."""
    global _num_retried
    with _lock:
        _num_retried += 1


def begin_under_driver() -> None:
    """This process is a worker, task or rank: its driver had answers from the servers that both ask.

    So a server that does not answer its first request is away, and not at a wrong address.
    """
    global _has_driver
    _has_driver = True


def has_driver() -> bool:
    return _has_driver


def num_retried() -> int:
    """Requests that this process has sent again so far. HDFS's client repeats its own unseen."""
    return _num_retried
