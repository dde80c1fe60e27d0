"""Where the progress of a command appears: as bars of a terminal, as occasional lines, or where another process draws
it.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Protocol

from shardmill.jobs.progress_lines import AS_JSON, VARIABLE, Bar, as_line

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PLAIN_LINE_SECONDS = 5.0
# Two units that end together give no rate.
_MIN_TIMED_SECONDS = 0.5
RELAYED_SECONDS = 0.1
"""Between two states of a bar that another process draws."""


class Screen(Protocol):
    """Shows lines, and at most one bar below them."""

    def say(self, line: str) -> None: ...

    def advance(self, bar: Bar) -> None:
        """Show a bar, or move it."""
        ...

    def clear(self) -> None:
        """Take the bar away."""
        ...

    def close(self) -> None: ...


def open_screen() -> Screen:
    """The screen of this process's stderr."""
    if os.environ.get(VARIABLE) == AS_JSON:
        return RelayedBars()
    return TerminalBars() if sys.stderr.isatty() else PlainLines()


class TerminalBars:
    """A bar at the bottom of a terminal."""

    def __init__(self) -> None:
        self._bars = _make_bars()
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def say(self, line: str) -> None:
        self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, bar: Bar) -> None:
        if bar.label not in self._tasks:
            self.clear()
            self._tasks[bar.label] = self._bars.add_task(bar.label, total=bar.num_total, unit=bar.unit)
        self._bars.update(self._tasks[bar.label], completed=bar.num_done, total=bar.num_total, unit=bar.unit)

    def clear(self) -> None:
        for task in self._tasks.values():
            self._bars.remove_task(task)
        self._tasks.clear()

    def close(self) -> None:
        self._bars.stop()


class RelayedBars:
    """Lines that the process which has started this one reads, and draws."""

    def __init__(self) -> None:
        self._shown = ""
        self._next = 0.0

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def advance(self, bar: Bar) -> None:
        now = time.monotonic()
        if bar.label == self._shown and bar.num_done != bar.num_total and now < self._next:
            return
        self._shown, self._next = bar.label, now + RELAYED_SECONDS
        self.say(as_line(bar))

    def clear(self) -> None:
        if self._shown:
            self._shown = ""
            self.say(as_line(Bar("", 0, None, "")))

    def close(self) -> None:
        self.clear()


class PlainLines:
    """A line every few seconds, for a log."""

    def __init__(self) -> None:
        self._marks: dict[str, list[tuple[float, int]]] = {}
        self._begun: set[str] = set()
        self._next_line = 0.0
        self._next_count = 0.0

    def say(self, line: str) -> None:
        sys.stderr.write(f"{line}\n")

    def advance(self, bar: Bar) -> None:
        if bar.num_total is None:
            self._count(bar)
        else:
            self._progress(bar, bar.num_total)

    def clear(self) -> None:
        """There is no bar."""

    def close(self) -> None:
        """Every line is written."""

    def _count(self, bar: Bar) -> None:
        if time.monotonic() >= self._next_count:
            # A short listing needs no line: the first one comes after the first few seconds.
            if self._next_count:
                self.say(f"{bar.label}: {bar.num_done:,} {bar.unit}")
            self._next_count = time.monotonic() + PLAIN_LINE_SECONDS

    def _progress(self, bar: Bar, num_total: int) -> None:
        now, num_done = time.monotonic(), bar.num_done
        # What was done before this process looked (kept units, resumed steps) says nothing about its rate, and neither
        # does the time until the first piece of work is done, when Spark was starting. So the second mark counts.
        marks = self._marks.setdefault(bar.label, [])
        if not marks or (len(marks) == 1 and num_done > marks[0][1]):
            marks.append((now, num_done))
        started, done_before = marks[-1]
        # If the beginning was printed, the end is printed too.
        ends = num_done == num_total and bar.label in self._begun
        if now < self._next_line and not ends:
            return
        if num_done < num_total:
            self._begun.add(bar.label)
        else:
            self._begun.discard(bar.label)
        self._next_line = now + PLAIN_LINE_SECONDS
        is_timed = now - started >= _MIN_TIMED_SECONDS
        rate = (num_done - done_before) / (now - started) if is_timed and num_done > done_before else 0.0
        left = "" if ends else f", {(num_total - num_done) / max(rate, 1e-9):,.0f} s left"
        a_second = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        pace = f", {a_second} a second{left}" if rate else ""
        self.say(f"{bar.label}: {num_done:,} of {num_total:,} {bar.unit}{pace}")


def _make_bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed:,.0f}/s", style="progress.data.speed")

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        RateColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )
