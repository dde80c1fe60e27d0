"""One file of the bad-input table, and what must become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardmill.values import RejectReason


@dataclass(frozen=True, slots=True)
class BadInput:
    """`notes` are those of an accepted image; a rejected one has a reason, and a detail that begins like `detail`."""

    row: int
    """Its row in docs/rejects.md; for a range of rows, one of them."""
    key: str
    content: bytes | Callable[[Path], None]
    """The bytes, or a function that makes the path."""
    reason: RejectReason | None = None
    detail: str = ""
    notes: tuple[str, ...] = ()
