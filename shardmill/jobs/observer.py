"""Observers receive a stage's events as they happen: the run's log, a terminal or a scheduler's log."""

from __future__ import annotations

from collections.abc import Mapping
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
