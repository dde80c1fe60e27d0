"""Forwards the output of a rank line by line, from its pipe or from this process, and keeps its end for errors.

A rank in the command's own process is read by `sys.stdout` and `sys.stderr`, and not by their descriptors: a pipe in
front of these would take the terminal from a debugger, and native code that fills it while it holds the interpreter's
lock would wait for a reader that never runs. It goes on to stderr: stdout belongs to the command's result (`--json`).
"""

from __future__ import annotations

import collections
import io
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from shardmill.jobs.observer import FieldValue
from train.contracts.values import OUTPUT
from train.reporting.observer import GlobalStep, TrainObserver

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


class TeedStream:
    """`stream`, of which `output` keeps what is written to it; what the driver writes goes to a stream of its own."""

    def __init__(self, stream: TextIO, output: InlineOutput, of_driver: TextIO) -> None:
        self._stream = stream
        self._output = output
        self._of_driver = of_driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        if self._output.driver_speaks:
            return self._of_driver.write(text)
        num_written = self._stream.write(text)
        self._output.record(text)
        return num_written

    def flush(self) -> None:
        self._stream.flush()
        self._of_driver.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


class InlineOutput:
    """Keeps what is printed until the thread that trains next calls the observer, and tells it first.

    So nobody who prints waits for a store, gets its errors, or calls the observer from a thread of theirs.
    """

    def __init__(self, observer: TrainObserver) -> None:
        self._observer = observer
        self._lines = OutputLines(lambda text: observer.event(OUTPUT, {"rank": 0, "text": text}))
        self._printed: deque[str] = deque()
        self._num_waiting = 0
        self._is_over = False
        self._trains = threading.current_thread()
        # The driver prints in this process too, and is no rank.
        self._driver = threading.local()

    @property
    def driver_speaks(self) -> bool:
        """Whether this thread is inside the observer."""
        return getattr(self._driver, "speaks", False)

    def record(self, text: str) -> None:
        """Record output from any thread."""
        # Between two steps no more is kept than all of them together may print.
        if self._is_over or self._num_waiting > MAX_TOLD_BYTES:
            return
        self._num_waiting += len(text)
        self._printed.append(text)

    def step(self, step: GlobalStep) -> None:
        """Forward a step to the observer."""
        with self._for_driver():
            self._observer.step(step)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Forward an event to the observer."""
        with self._for_driver():
            self._observer.event(name, fields)

    def end(self) -> None:
        """The training is over; streams that somebody has kept are not printed any more."""
        with self._for_driver():
            self._lines.end()
        self._is_over = True

    @contextmanager
    def _for_driver(self) -> Iterator[None]:
        self._driver.speaks = True
        try:
            if threading.current_thread() is self._trains:
                printed = [self._printed.popleft() for _ in range(len(self._printed))]
                self._lines.add("".join(printed).encode(errors="replace"))
            yield
        finally:
            self._driver.speaks = False


@contextmanager
def gathered(observer: TrainObserver) -> Iterator[TrainObserver]:
    """An observer to train with, who tells what is printed inside.

    In the main thread alone, as streams are the process's; and where there are streams.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or sys.stdout is None or sys.stderr is None:
        yield observer
        return
    output = InlineOutput(observer)
    out: Any = TeedStream(sys.stderr, output, of_driver=sys.stdout)
    err: Any = TeedStream(sys.stderr, output, of_driver=sys.stderr)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            yield output
    finally:
        output.end()
