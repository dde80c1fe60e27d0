"""Calls a command for a caller in Python: options are keyword arguments, the result is the document that it prints."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from shardmill.calls.predictions import Predictions
from shardmill.calls.process import Command
from shardmill.calls.settings import as_options
from shardmill.calls.watchers import watcher_of
from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError

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
