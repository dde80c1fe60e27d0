"""Texts for people: numbers and names in output and errors, names that cannot rewrite a terminal or a log by the escape
sequences in them, and cells of a CSV that people edit in a spreadsheet, where none is a formula and none is lost.
"""

from __future__ import annotations

import re
import unicodedata
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


# Format characters that real names need: joiners (Persian, emoji) and the tags inside some flags.
_NEEDED = frozenset({0x200C, 0x200D, *range(0xE0020, 0xE0080)})


def printable(text: str) -> str:
    r"""`text` with every control, bidirectional or otherwise invisible character escaped, such as `\x1b`. NUL, which
    separates an archive from its member, is `\0`, as in a CSV of keys: the number of a row may follow it.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def without_surrogates(text: str) -> str:
    r"""`text` in a form that every encoder accepts: a surrogate for a byte that is not UTF-8 becomes `\xff`."""
    return re.sub("[\ud800-\udfff]", lambda found: _escaped(found[0]), text)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":
        # Python represents the byte 0x80 as U+DC80, and so on.
        return rf"\x{ord(character) - 0xDC00:02x}"
    # Control, format, surrogate, line and paragraph separator.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    if not hidden or ord(character) in _NEEDED:
        return character
    return r"\0" if character == "\0" else character.encode("unicode_escape").decode()


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
