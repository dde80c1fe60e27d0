"""Makes the whole numbers that a caller gives a loader Python's own, for the keys and states that are made of them."""

from __future__ import annotations

from typing import Any

from shardmill.errors import UsageError


def whole_number(name: str, given: Any, *, least: int | None = None) -> int:
    """`given` as an `int`: also a number of NumPy, or a framework's counter of steps. Raises UsageError for others."""
    try:
        number = int(given)
        is_whole = bool(number == given)
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole or (least is not None and number < least):
        raise UsageError(
            f"{name} = {given!r}",
            "expected a whole number" + ("" if least is None else f" from {least} on"),
            f"pass, for example, {max(1, least or 0)}",
        )
    return number
