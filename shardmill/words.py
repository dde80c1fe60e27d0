"""Formats numbers for people, in command output and error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size_of(num_bytes: float) -> str:
    """`1.5 GiB`, `0.2 KiB`."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes / 2**10:,.1f} KiB"


def name_some(names: Sequence[str], limit: int = 5) -> str:
    """`a, b, c, d, e and 7 more`: the first names, and how many more there are."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def first_of(names: Sequence[str], limit: int) -> str:
    """`a, b, c, ...`: the first names, and a sign that there are more."""
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")


def reasons(by_reason: Mapping[str, int]) -> str:
    """`decode_error 2, empty_file 1`: the reasons that inputs were rejected for."""
    return ", ".join(f"{reason} {number:,}" for reason, number in by_reason.items() if number)


def rejected(number: int, by_reason: Mapping[str, int]) -> str:
    """`3 rejected (decode_error 2, empty_file 1)`."""
    return f"{number:,} rejected" + (f" ({named})" if (named := reasons(by_reason)) else "")
