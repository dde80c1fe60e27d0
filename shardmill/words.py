"""Numbers as people read them, in what commands print and errors say."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
