"""Observers receive a stage's events as they happen: the run's log, a terminal or a scheduler's log.

The progress of a command is lines on its stderr, for the process that has started it to draw it: a line that begins
with the record separator of RFC 7464 is a `Bar` as JSON; every other line is text for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

FieldValue = str | int | float | bool | None

WARNING = "warning"
"""The field that makes an event a warning: one sentence for people, which the run's summary keeps."""

RETRIED = "retried_requests"
"""The field with a number of requests to storage that other processes than the driver have sent again."""


def is_progress(name: str) -> bool:
    """Whether an event comes with each step, shard or unit: observers show some of them, and record none."""
    return name.endswith(".progress")


class Observer(Protocol):
    """Receives the events of a stage; called in the driver's main thread."""

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Something worth a line in `events.jsonl` happened, such as `etl.progress` or `etl.committed`."""
        ...


class SilentObserver:
    """Drops every event."""

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        return


VARIABLE = "SHARDMILL_PROGRESS"
"""Variable of the environment that a caller in Python sets: how its command shows progress. The result is its value."""
AS_JSON = "json"
"""As lines that the caller draws."""
AS_DRAWN = "drawn"
"""On the terminal, as without a caller."""
_SEPARATOR = "\x1e"


@dataclass(frozen=True, slots=True)
class Bar:
    """How far one activity has come."""

    label: str
    num_done: int
    num_total: int | None
    """None as long as the end is not known."""
    unit: str


def as_line(bar: Bar) -> str:
    """The line that `as_bar` reads."""
    return f"{_SEPARATOR}{json.dumps(asdict(bar))}"


def as_bar(line: str) -> Bar | None:
    """The bar that a line holds; None for text."""
    return Bar(**json.loads(line[1:])) if line.startswith(_SEPARATOR) else None
