"""Calls a command for a caller in Python: options are keyword arguments, the result is the document that it prints."""

from __future__ import annotations

import difflib
import functools
import html
import inspect
import json
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from shardmill.calls.predictions import Predictions
from shardmill.calls.process import Command, Watcher
from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.jobs.observer import Bar, as_bar

_BARE = re.compile(r"[A-Za-z0-9_-]+")
# Of `shardmill.run` and its neighbours, which take what they do not know as settings.
_ARGUMENTS = (
    "workdir", "run_id", "replace_source", "fresh", "allow_change", "quiet", "rollback", "require_promotion",
    "replace_current", "out", "top", "layer", "engine", "against", "max_drift", "keep", "older_than", "delete",
    "max_bytes", "world_size", "rehearse",
)  # fmt: skip


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """`train={"epochs": 3}` and `**{"train.epochs": 3}` are both `--set train.epochs=3`.

    Raises UsageError for a setting without a section, and for a value that TOML has no form for.
    """
    for name, value in settings.items():
        if "." not in name and not isinstance(value, Mapping):
            near = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.75)
            raise UsageError(
                f"{name} = {value!r} names no section of the config",
                "expected a section with its keys, such as train={'epochs': 3}",
                f"did you mean {near[0]}={value!r}?"
                if near
                else f"write SECTION={{{name!r}: {value!r}}}; `shardmill config show` prints every key",
            )
    return [
        option for name, value in settings.items() for key, leaf in _leaves(name, value)
        for option in ("--set", f"{key}={_toml(key, leaf)}")
    ]  # fmt: skip


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys of a section one by one: those that are not named keep the values that they have."""
    # A name that is no bare key, of a class say, can stand in a table of values only.
    if isinstance(value, Mapping) and value and all(_BARE.fullmatch(str(name)) for name in value):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _quoted(text: str) -> str:
    # Of what JSON leaves as it is, TOML forbids one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(key: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | os.PathLike():
            return _quoted(os.fspath(value))
        case int() | float():
            # Also a NumPy float, whose `repr` names its type.
            return repr(float(value)) if isinstance(value, float) else str(int(value))
        case Mapping():
            rows = (f"{_quoted(str(name))} = {_toml(key, each)}" for name, each in value.items())
            return f"{{{', '.join(rows)}}}"
        case list() | tuple():
            return f"[{', '.join(_toml(key, each) for each in value)}]"
    if hasattr(value, "tolist"):
        return _toml(key, value.tolist())
    raise UsageError(
        f"{key} = {value!r}",
        "expected a number, a text, True or False, or a list or a dict of these",
        "leave a setting out for its default",
    )


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


Given = ParamSpec("Given")
Value = TypeVar("Value")
Folder = str | os.PathLike[str]
Place = Folder | Dataset | Predictions


def without_settings(function: Callable[Given, Value]) -> Callable[Given, Value]:
    """For a function that takes no settings: a mistyped argument gets the answer that it gets where those are taken."""
    parameters = inspect.signature(function).parameters.values()
    known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]

    @functools.wraps(function)
    def called(*places: Given.args, **arguments: Given.kwargs) -> Value:
        for name in arguments:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                raise UsageError(
                    f"{function.__name__} has no argument {name!r}",
                    f"expected some of {', '.join(known)}",
                    f"did you mean {near[0]}?" if near else "correct its name",
                )
        return function(*places, **arguments)

    return called


def flags(**flags: bool) -> list[str]:
    """The options without a value that are set."""
    return [f"--{name.replace('_', '-')}" for name, is_set in flags.items() if is_set]


def named(**options: Place | float | None) -> list[str]:
    """The options with a value that are given: neither None nor empty."""
    given = {name: word_of(value) for name, value in options.items() if value is not None}
    return [part for name, word in given.items() if word for part in (f"--{name.replace('_', '-')}", word)]


def repeated(option: str, values: Sequence[str]) -> list[str]:
    """An option that is given once for each value."""
    return [part for value in values for part in (option, value)]


def call(
    name: str, places: Sequence[Place], options: Sequence[str], settings: Mapping[str, Any] | None = None, *,
    quiet: bool,
) -> Any:  # fmt: skip
    """The document of `shardmill NAME`. Raises the ShardmillError with which the command ends."""
    words = [word_of(place) for place in places]
    command = Command(name, [*options, *as_options(settings or {}), "--", *words])
    return command.run(watcher_of(f"shardmill.{name.replace('-', '_')} {' '.join(words)}", quiet=quiet))


def word_of(value: Place | float) -> str:
    """A path, a number, or `URI@N` of a version."""
    version = value.dataset if isinstance(value, Predictions) else value
    if isinstance(version, Dataset):
        return f"{version.pin.uri}@{version.pin.version}"
    return os.fspath(version) if isinstance(version, os.PathLike) else str(version)


def value_of(kind: type[Value], document: Any) -> Value:
    """A document as the value that it was made from, or that has its figures."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_python(document)
