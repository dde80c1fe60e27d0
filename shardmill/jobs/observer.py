"""How a stage reports what happens while it happens; the run's log, a terminal and a scheduler's log are observers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

FieldValue = str | int | float | bool | None


class Observer(Protocol):
    """Takes the events of a stage; called in the driver's main thread."""

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        """Something worth a line in `events.jsonl` happened, such as `etl.progress` or `etl.committed`."""
        ...


class SilentObserver:
    """Drops every event."""

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        return
