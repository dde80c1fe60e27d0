"""Records which export is current: a numbered pointer that only one writer can set.

<models>/current/00000001.json      the highest number is the current one; older ones tell the history
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from shardmill.errors import IntegrityError, UsageError
from shardmill.section import Section
from shardmill.storage import Store
from train.records import put_record, read_record, record_numbers

CURRENT = "current"


class Pointer(Section):
    """One change of the current export."""

    export: int
    previous: int | None
    """The export to which a rollback goes; None for the first."""
    replaced: int | None
    """The export that was current until now."""
    decision: Literal["promoted", "chosen", "rolled_back"]
    """By the gate, by a user who named the export, or by a rollback."""
    reason: str
    accuracy: float | None
    """Metric of the export on its evaluation split: top-1 accuracy, or the equivalent for its labels."""
    run_id: str
    created_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class History:
    """Every change of the current export, oldest first; None in place of a record that cannot be read."""

    pointers: tuple[Pointer | None, ...]
    next_number: int
    damage: str
    """Why the newest record cannot be read; empty if it can."""

    @property
    def readable(self) -> list[Pointer]:
        return [pointer for pointer in self.pointers if pointer is not None]

    @property
    def current(self) -> Pointer | None:
        """The current export; None if there is none, or if it is unknown (`damage`)."""
        return self.pointers[-1] if self.pointers else None

    @property
    def stack(self) -> list[int]:
        """The exports to which rollbacks go back, oldest first, and on top the current one."""
        stack: list[int] = []
        for pointer in self.readable:
            below = [] if pointer.previous is None else [pointer.previous]
            if pointer.decision == "rolled_back":
                del stack[-1:]
                if stack[-1:] != [pointer.export]:
                    # What it undid cannot be read.
                    stack = [*below, pointer.export]
            else:
                # The record before it may have been damaged.
                stack = [*(stack if stack[-1:] == below else below), pointer.export]
        return stack

    def was_rolled_back(self, export: int) -> bool:
        """Was this export rolled back, and not made current since? If in doubt, it was."""
        out: set[int | None] = set()
        seen: set[int] = set()
        for pointer in self.pointers:
            if pointer is None:
                # It may have been the rollback of any export that was current by then.
                out |= seen
                continue
            if pointer.decision == "rolled_back":
                out.add(pointer.replaced)
            out.discard(pointer.export)
            seen.add(pointer.export)
        return export in out


def read_history(store: Store, *, is_layout_free: bool = False) -> History:
    """The pointer and all before it. A damaged record is not an error: it must not prevent setting a new one.

    Raises UsageError if the newest is intact but of another layout; with `is_layout_free` that counts as damage.
    """
    numbers = record_numbers(store, CURRENT)
    pointers: list[Pointer | None] = []
    newest_error: IntegrityError | UsageError | None = None
    for number in numbers:
        try:
            pointers.append(read_record(store, CURRENT, number, Pointer))
            # Only the newest record decides what is current: damage of an older one is superseded by this one.
            newest_error = None
        except (IntegrityError, UsageError) as error:
            pointers.append(None)
            newest_error = error
    if isinstance(newest_error, UsageError) and not is_layout_free:
        fix = f"use that version, or `shardmill promote {store.uri}@N`"
        raise UsageError(newest_error.what, newest_error.expected, fix)
    return History(tuple(pointers), max(numbers, default=0) + 1, newest_error.what if newest_error else "")


def set_current(store: Store, history: History, pointer: Pointer) -> bool:
    """Publish `pointer` behind `history`; False if another writer did so first."""
    # The number after the history that was judged, not the next free one: if another writer took it, that judgement is
    # out of date.
    return put_record(store, CURRENT, history.next_number, pointer)


def unknown_current(models_uri: str, history: History) -> IntegrityError:
    """The error for a damaged newest record: it is unknown which export is current."""
    return IntegrityError(
        history.damage,
        "this file records which export is current",
        f"choose one: `shardmill promote {models_uri}@N`",
    )


def now() -> str:
    """When a pointer is set: UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
