"""Requests to an object store, whatever its client: repeated until a deadline, read in pieces, created at most once.

One loop, around each request and the reading of its answer, in place of the clients' own: a conditional PUT that a
client repeats unseen is refused because of itself. Each request is made by the thread that asks.
"""

from __future__ import annotations

import errno
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import NoReturn, TypeVar

from shardmill.errors import UsageError
from shardmill.stores.retries import FirstAnswer, patiently, words_of_error

PIECE_BYTES = 1 << 24
"""Maximum transfer of one request, so that a slow line needs no other deadline than a fast one."""
_PARALLEL = 4
_MAX_DAMAGED = 3
Value = TypeVar("Value")


class Failure(Enum):
    """What an error of the client says of the request."""

    ABSENT = auto()
    """The server: there is no such object or bucket."""
    TAKEN = auto()
    """The server: the condition of the request is not met."""
    REFUSED = auto()
    """The server's answer, and it will stay the same."""
    BUSY = auto()
    """The server's answer, which may be another one later."""
    NOT_SENT = auto()
    """Nobody took the connection."""
    LOST = auto()
    """No answer came, or only a part of it."""
    DAMAGED = auto()
    """The answer's body does not match the checksum that the server keeps of it."""
    OTHER = auto()
    """Nothing that another attempt would change."""


_ANSWERS = {Failure.ABSENT, Failure.TAKEN, Failure.REFUSED, Failure.BUSY}
_TRANSIENT = {Failure.BUSY, Failure.NOT_SENT, Failure.LOST, Failure.DAMAGED}


class UnknownOutcome(OSError):
    """A conditional PUT was sent, and neither its answer nor the object could be had."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of an object that one ranged GET returned."""

    data: bytes
    object_bytes: int
    etag: str


class BucketRequests(ABC):
    """The connections of one process to the servers of a scheme; abstract. Safe to use from several threads.

    What a server refuses is raised as OSError: FileNotFoundError for an object or bucket that is not there,
    PermissionError for a 403.
    """

    def __init__(self, deadline_variable: str) -> None:
        self._deadline_variable = deadline_variable
        self._deadline_seconds = given_deadline_seconds(deadline_variable)
        self._first_answer = FirstAnswer()

    def get(self, bucket: str, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """`num_bytes` from `start`, or all; fewer at the end of the object, none behind it."""
        size = PIECE_BYTES if num_bytes is None else min(num_bytes, PIECE_BYTES)
        is_whole = num_bytes is None

        def get(at: int, num_bytes: int) -> Piece:
            return self._patiently(lambda deadline: self._get_piece(bucket, key, (at, num_bytes), deadline, is_whole))

        with self._as_os_error():
            first = get(start, size)
            end = first.object_bytes if num_bytes is None else min(first.object_bytes, start + num_bytes)
            others = a_few_at_once(
                [
                    lambda at=at: get(at, min(PIECE_BYTES, end - at))
                    for at in range(start + PIECE_BYTES, end, PIECE_BYTES)
                ]
            )
        if any(piece.etag != first.etag for piece in others):
            raise OSError(errno.EIO, "it was replaced while it was read")
        return b"".join(piece.data for piece in (first, *others)) if others else first.data

    @abstractmethod
    def put(self, bucket: str, key: str, data: bytes) -> None:
        """The object is there whole, or as it was."""

    @abstractmethod
    def put_file(self, bucket: str, key: str, file: Path) -> None:
        """Like `put`, for a file of which only a few pieces are in memory at once."""

    def create(self, bucket: str, key: str, data: bytes) -> bool:
        """PUT unless the name exists: whether the object is this call's. Raises UnknownOutcome if nothing tells."""
        is_unknown = False

        def attempt(deadline: float) -> bool:
            nonlocal is_unknown
            try:
                self._put_new(bucket, key, data)
                return True
            except Exception as error:
                # "Taken" may be the answer to a repetition of what was done, by a proxy on the way. The object alone
                # tells, now or after the next attempt.
                failure = self._failure_of(error)
                if failure is not Failure.TAKEN and (failure not in _TRANSIENT or failure is Failure.NOT_SENT):
                    raise
                is_unknown = True
                try:
                    return self._get_piece(bucket, key, (0, len(data) + 1), deadline, is_whole=True).data == data
                except Exception as absent:
                    if self._failure_of(absent) is not Failure.ABSENT:
                        raise
                raise

        with self._as_os_error():
            try:
                return self._patiently(attempt)
            except Exception as error:
                if is_unknown:
                    raise UnknownOutcome(errno.EIO, self._words_of(error)) from error
                raise

    @abstractmethod
    def _get_piece(self, bucket: str, key: str, place: tuple[int, int], deadline: float, is_whole: bool) -> Piece:
        """One request, of `place`: start, number of bytes. Of an object that ends before, none.

        `is_whole`: what is asked for is a piece of a whole object, of which a checksum may be had.
        """

    @abstractmethod
    def _put_new(self, bucket: str, key: str, data: bytes) -> None:
        """One request; it fails as `Failure.TAKEN` if the name exists."""

    @abstractmethod
    def _failure_of(self, error: BaseException) -> Failure: ...

    @abstractmethod
    def _as_os_error(self) -> AbstractContextManager[None]:
        """Convert a server's refusal to the OSError that a file system would raise, with the server's words."""

    def _words_of(self, error: BaseException) -> str:
        return words_of_error(error)

    def _patiently(self, request: Callable[[float], Value]) -> Value:
        """As `shardmill.stores.retries.patiently`; the last request may stall beyond the deadline."""
        failed: list[tuple[Failure, BaseException]] = []

        def is_worth_another(error: BaseException | None, seconds: float) -> bool:
            failure = None if error is None else self._failure_of(error)
            if failure is None or failure in _ANSWERS:
                self._first_answer.has_come = True
            if error is None or failure is None or failure not in _TRANSIENT:
                return False
            failed.append((failure, error))
            if sum(each is Failure.DAMAGED for each, _ in failed) == _MAX_DAMAGED:
                # Not on its way: there.
                return False
            return failure is not Failure.NOT_SENT or self._first_answer.is_awaited(seconds)

        def give_up() -> NoReturn:
            waited = f"no success within {self._deadline_seconds:g} s ({self._deadline_variable})"
            _, last = failed[-1]
            raise OSError(errno.EIO, f"{waited}; the last of {len(failed)} errors: {self._words_of(last)}") from last

        return patiently(request, is_worth_another, self._deadline_seconds, give_up, self._words_of)


def received_whole(blocks: Iterable[bytes], place: tuple[int, int], object_bytes: int, deadline: float) -> bytes:
    """The bytes at `place` (start, number of bytes) of an object, from the blocks of an answer's body.

    Raises TimeoutError if some are missing at the deadline, and ConnectionError if some are when the body ends.
    """
    start, num_bytes = place
    expected_bytes, num_received, received = min(num_bytes, object_bytes - start), 0, list[bytes]()
    for block in blocks:
        received.append(block)
        num_received += len(block)
        if num_received != expected_bytes and time.monotonic() > deadline:
            raise TimeoutError(f"{num_received} bytes received from {start} of {object_bytes}, slowly")
    if num_received != expected_bytes:
        raise ConnectionError(f"received {num_received} bytes from {start} of {object_bytes}")
    return b"".join(received)


def a_few_at_once(requests: list[Callable[[], Value]]) -> list[Value]:
    if not requests:
        return []
    with ThreadPoolExecutor(_PARALLEL, "shardmill-bucket") as pool:
        futures = [pool.submit(request) for request in requests]
        # The first error cancels requests that have not begun, and the others are waited for, so that none is still
        # running when the caller handles the error.
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        return [future.result() for future in futures]


def given_deadline_seconds(variable: str) -> float:
    """Raises UsageError if the environment's value is not a number of seconds."""
    given = os.environ.get(variable) or "120"
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{variable} = {given!r}", "expected a number of seconds above 0", f"set {variable}=120")
    return seconds
