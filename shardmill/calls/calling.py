"""Makes functions of commands: arguments become options and settings, the printed document becomes the result."""

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from shardmill.calls.predictions import Predictions
from shardmill.calls.process import Command, Watcher
from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.jobs.observer import Bar, as_bar

if TYPE_CHECKING:
    from shardmill.jobs.lent_spark import LentSpark

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def as_options(settings: Mapping[str, Any], arguments: Collection[str] = ()) -> list[str]:
    """`train={"epochs": 3}` and `**{"train.epochs": 3}` are both `--set train.epochs=3`.

    Raises UsageError for a setting without a section, which may be a mistyped one of `arguments`, and for a value that
    TOML has no form for.
    """
    for name, value in settings.items():
        if "." not in name and not isinstance(value, Mapping):
            near = difflib.get_close_matches(name, arguments, n=1, cutoff=0.75)
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
Location = Folder | Dataset | Predictions
_OURS = frozenset({"quiet", "spark"})
"""Keywords that are no option of the command."""


def command(
    result_of: Callable[[Any, Mapping[str, Any]], Value],
    complete: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: given,
    **options: str,
) -> Callable[[Callable[Given, Value]], Callable[Given, Value]]:
    """Makes a declaration the function that runs the command of its name: its places are the command's arguments, its
    keywords the options, what else it takes the settings.

    `result_of`: the value of the printed document, and of the function's arguments by name. `complete`: what stands for
    arguments that were left out. `options`: of keywords that the command names differently.
    """

    def of(declared: Callable[Given, Value]) -> Callable[Given, Value]:
        signature = inspect.signature(declared)
        kinds = {name: each.kind for name, each in signature.parameters.items()}
        keywords = [name for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY]
        name = declared.__name__

        @functools.wraps(declared)
        def called(*places: Given.args, **arguments: Given.kwargs) -> Value:
            settings = {key: value for key, value in arguments.items() if key not in keywords}
            if settings and inspect.Parameter.VAR_KEYWORD not in kinds.values():
                raise _unknown(name, next(iter(settings)), keywords)
            bound = signature.bind(*places, **arguments)
            bound.apply_defaults()
            given = complete(bound.arguments)
            words = [word_of(given[each]) for each in kinds if kinds[each] is inspect.Parameter.POSITIONAL_ONLY]
            chosen = {options.get(each, each): given[each] for each in keywords if each not in _OURS}
            lent, settings = _lent(given.get("spark"), settings)
            words_of_options = [*_as_words(chosen), *as_options(settings, keywords)]
            document = _run(name, words, words_of_options, quiet=given["quiet"], spark=lent)
            return result_of(document, given)

        return called

    return of


def _unknown(name: str, argument: str, known: Sequence[str]) -> UsageError:
    near = difflib.get_close_matches(argument, known, n=1)
    return UsageError(
        f"{name} has no argument {argument!r}",
        f"expected some of {', '.join(known)}",
        f"did you mean {near[0]}?" if near else "correct its name",
    )


def _as_words(options: Mapping[str, Any]) -> Iterator[str]:
    """A flag for True, one option for each of several values, and nothing for what is left open."""
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            yield option
        elif isinstance(value, list | tuple):
            yield from (part for each in value for part in (option, word_of(each)))
        elif value is not None and value is not False and (word := word_of(value)):
            yield from (option, word)


def _lent(spark: Any, settings: Mapping[str, Any]) -> tuple[LentSpark | None, Mapping[str, Any]]:
    """The caller's session as the command uses it, and the settings with which it does; those that are given win."""
    if spark is None or isinstance(spark, Mapping):
        return None, settings if spark is None else {"spark": spark, **settings}
    from shardmill.jobs.lent_spark import LentSpark

    lent = LentSpark(spark)
    return lent, {"spark.master": lent.tasks.master, "etl.engine": "spark", **settings}


def _run(
    name: str, words: Sequence[str], options: Sequence[str], *, quiet: bool, spark: LentSpark | None = None
) -> Any:
    """The document of `shardmill NAME`. Raises the ShardmillError with which the command ends."""
    places = [word for word in words if word]
    watcher = watcher_of(f"shardmill.{name} {' '.join(places)}", quiet=quiet)
    return Command(name.replace("_", "-"), [*options, "--", *places], spark).run(watcher)


def word_of(value: Location | float) -> str:
    """A path, a number, or `URI@N` of a version."""
    version = value.dataset if isinstance(value, Predictions) else value
    if isinstance(version, Dataset):
        return f"{version.pin.uri}@{version.pin.version}"
    return os.fspath(version) if isinstance(version, os.PathLike) else str(version)
