"""Shows what a command says: on a terminal, in the output of a notebook's cell, in a log, or not at all."""

from __future__ import annotations

import html
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardmill.calls.process import Watcher
from shardmill.jobs.progress_lines import Bar, as_bar

_UPDATE_SECONDS = 0.2
_LAST_LINES = 20
_SHOWN_LINES = 200


def watcher_of(title: str, *, quiet: bool) -> Watcher:
    """The watcher that fits where this process runs."""
    if quiet:
        return Silence()
    if _is_notebook():
        return NotebookOutput(title)
    return Terminal() if sys.stderr is sys.__stderr__ and sys.stderr.isatty() else Log()


def _is_notebook() -> bool:
    # Imported by a notebook's kernel long ago; IPython in a terminal has no kernel.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Terminal:
    """The command draws on the terminal by itself."""

    takes_lines = False
    unseen: Sequence[str] = ()

    def line(self, line: str) -> None:
        """It comes to none."""

    def end(self, *, has_failed: bool) -> None:
        """The command has taken its bar away."""


class Silence:
    """Keeps the last lines, for an error that they explain."""

    takes_lines = True

    def __init__(self) -> None:
        self.unseen: deque[str] = deque(maxlen=_LAST_LINES)

    def line(self, line: str) -> None:
        if as_bar(line) is None and not _is_error(line):
            self.unseen.append(line)

    def end(self, *, has_failed: bool) -> None:
        """Nothing was shown."""


class Log:
    """Lines on stderr, wherever Python has it."""

    takes_lines = True
    unseen: Sequence[str] = ()

    def line(self, line: str) -> None:
        if as_bar(line) is None and not _is_error(line):
            sys.stderr.write(f"{line}\n")

    def end(self, *, has_failed: bool) -> None:
        sys.stderr.flush()


@dataclass(slots=True)
class NotebookOutput:
    """One output of a cell, which is updated in place: a bar while the command works, above the lines that it said."""

    title: str
    takes_lines: bool = True
    unseen: Sequence[str] = ()
    # Each update sends all of them; the run's log has the others.
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_SHOWN_LINES))
    _bar: Bar | None = None
    _handle: Any = None
    _started: float = field(default_factory=time.monotonic)
    _next: float = 0.0

    def line(self, line: str) -> None:
        bar = as_bar(line)
        if bar is not None:
            self._bar = bar if bar.label else None
        elif not _is_error(line):
            self._lines.append(line)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _UPDATE_SECONDS
            self._show(self._progress(), is_open=True)

    def end(self, *, has_failed: bool) -> None:
        seconds = time.monotonic() - self._started
        state = "failed after" if has_failed else "done in"
        self._show(html.escape(f"{self.title}: {state} {seconds:.1f} s"), is_open=has_failed)

    def _progress(self) -> str:
        if self._bar is None:
            return html.escape(self.title)
        bar = self._bar
        known = "" if bar.num_total is None else f' max="{bar.num_total}" value="{bar.num_done}"'
        of = "" if bar.num_total is None else f" of {bar.num_total:,}"
        words = html.escape(f"{bar.label}: {bar.num_done:,}{of} {bar.unit}")
        return f'<progress{known} style="width: 20em; vertical-align: middle"></progress> {words}'

    def _show(self, head: str, *, is_open: bool) -> None:
        from IPython.display import display

        text = "\n".join(self._lines)
        lines = f'<pre style="white-space: pre-wrap; font-size: 85%">{html.escape(text)}</pre>'
        shown = {
            "text/html": f"<details{' open' * is_open}><summary>{head}</summary>{lines}</details>",
            "text/plain": text,
        }
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def _is_error(line: str) -> bool:
    """The last line of a command that fails, which becomes an exception."""
    return re.match(r"ERROR \d+: ", line) is not None
