"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

from collections.abc import Sequence


def cell(text: str) -> str:
    """Text of several lines as the content of one cell."""
    return " ".join(text.split()).replace("|", "\\|")


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, and an empty one behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]
