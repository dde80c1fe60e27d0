"""Records the Python output of a training in the command's own process, which also goes to stderr.

Not to stdout, which belongs to the command's result: with `--json` a program reads it.

By `sys.stdout` and `sys.stderr`, and not by their descriptors: a pipe in front of these would take the terminal from a
debugger, and native code that fills it while it holds the interpreter's lock would wait for a reader that never runs.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO

from shardmill.jobs.observer import FieldValue
from train.contracts.values import OUTPUT
from train.launching.output import MAX_TOLD_BYTES, OutputLines
from train.reporting.observer import GlobalStep, TrainObserver


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
