"""What `shardmill.promote` decided, as a value: which export is current now, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.html import table
from shardmill.jobs.summary_rows import Rows, lines_of


@dataclass(frozen=True, slots=True)
class PromotionResult:
    """A decision. It shows itself as a table in a notebook, and with `print`."""

    run_id: str
    models: str
    """URI of the models."""
    decision: str
    """`promoted`, `kept`, `already_current`, `chosen` or `rolled_back`."""
    reason: str
    current: int | None
    """Number of the export that is current now."""
    previous: int | None
    """Number of the one that was current before."""
    registered: str | None
    """`models:/NAME/VERSION` at MLflow; empty if that failed, None without a registry."""

    @classmethod
    def of(cls, run_id: str, section: Mapping[str, Any]) -> PromotionResult:
        """From the section of a run's summary."""
        names = ("models", "decision", "reason", "current", "previous", "registered")
        return cls(run_id, **{name: section[name] for name in names})

    def _rows(self) -> Rows:
        rows: Rows = [("models", self.models), ("model", f"{self.decision}: {self.reason}")]
        rows.append(("current", "none" if self.current is None else f"export {self.current}"))
        return [*rows, *([("registered", self.registered)] if self.registered else [])]

    def __str__(self) -> str:
        return lines_of(self._rows())

    def _repr_html_(self) -> str:
        return table(self._rows())
