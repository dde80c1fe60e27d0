"""Formats numbers for people, in command output and error messages."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def first_of(names: Sequence[str], limit: int) -> str:
    """`a, b, c, ...`: the first names, and a sign that there are more."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
