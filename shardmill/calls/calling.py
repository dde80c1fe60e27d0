"""Calls a command for a caller in Python: options are keyword arguments, the result is the document that it prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from shardmill.calls.predictions import Predictions
from shardmill.calls.process import Command
from shardmill.calls.settings import as_options
from shardmill.calls.watchers import watcher_of
from shardmill.dataset.dataset import Dataset

Value = TypeVar("Value")
Folder = str | os.PathLike[str]
Place = Folder | Dataset | Predictions


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
