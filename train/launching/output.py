"""Forwards the output of a rank's process line by line, and keeps its end for an error message."""

from __future__ import annotations

import collections
import io
from collections.abc import Callable

MAX_TOLD_BYTES = 4 << 20
"""Limit for one process, so that a model that prints its weights cannot fill the driver's memory or disk."""
MAX_LINE_BYTES = 2000
NUM_TAIL_LINES = 40
_READ_BYTES = 1 << 16


class OutputLines:
    """The output of one process, cut into lines."""

    def __init__(self, emit: Callable[[str], None]) -> None:
        """`emit` is given one or more whole lines at a time; of a long one the end, of too many the first."""
        self._emit = emit
        self._num_left = MAX_TOLD_BYTES
        self._unfinished = b""
        self._tail: collections.deque[bytes] = collections.deque(maxlen=NUM_TAIL_LINES)

    def add(self, data: bytes) -> None:
        """Add the next output. User code may print anything, including text without line ends."""
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = unfinished[-MAX_LINE_BYTES:]
        self._take(lines)

    def end(self) -> None:
        """End the output."""
        if self._unfinished:
            self._take([self._unfinished])
            self._unfinished = b""

    def tail(self) -> str:
        """The last lines so far."""
        return b"\n".join(self._tail).decode(errors="replace").strip()

    def _take(self, lines: list[bytes]) -> None:
        lines = [line[-MAX_LINE_BYTES:] for line in lines]
        self._tail += lines
        text = b"".join(line + b"\n" for line in lines)
        if not text or self._num_left <= 0:
            return
        self._num_left -= len(text)
        if self._num_left <= 0:
            end = text.rfind(b"\n", 0, len(text) + self._num_left) + 1
            text = text[:end] + f"(more than {MAX_TOLD_BYTES:,} bytes; truncated)\n".encode()
        self._emit(text.decode(errors="replace"))


class RankOutput:
    """The output of one process's pipe, read until it ends."""

    def __init__(self, pipe: io.BufferedReader, emit: Callable[[str], None]) -> None:
        """`emit`: as that of `OutputLines`."""
        self._pipe = pipe
        self._lines = OutputLines(emit)

    def read(self) -> None:
        """Return when nothing is left that holds the other end open."""
        while data := self._pipe.read1(_READ_BYTES):
            self._lines.add(data)
        self._lines.end()

    def tail(self) -> str:
        """The last lines so far."""
        return self._lines.tail()
