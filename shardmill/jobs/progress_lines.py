"""The progress of a command as lines on its stderr, for the process that has started it to draw it.

A line that begins with the record separator of RFC 7464 is a `Bar` as JSON; every other line is text for people.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

VARIABLE = "SHARDMILL_PROGRESS"
"""Variable of the environment in which the starting process asks for such lines."""
AS_JSON = "json"
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
