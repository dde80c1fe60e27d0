"""Texts as cells of a CSV that people open in a spreadsheet, edit and save: no cell is a formula, and none is lost."""

from __future__ import annotations

import re

# A cell that begins with one of these is a formula to a spreadsheet, which may run commands.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def harmless(text: str) -> str:
    """`text` with an apostrophe in front if a spreadsheet would take it for a formula."""
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


def to_cell(text: str) -> str:
    r"""`text` in a form that `from_cell` reads back: NUL, which separates an archive from its member, is `\0`."""
    escaped = text.replace("\\", "\\\\").replace("\0", "\\0")
    return f"'{escaped}" if escaped.startswith(("'", *FORMULA_STARTS)) else escaped


def from_cell(cell: str) -> str:
    """The text of a cell that `to_cell` wrote, or that somebody typed."""
    if cell.startswith("'") and cell[1:].startswith(("'", *FORMULA_STARTS)):
        cell = cell[1:]
    return re.sub(r"\\([\\0])", lambda found: "\0" if found[1] == "0" else "\\", cell)
