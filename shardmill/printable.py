"""Escapes names for display: a file name can contain escape sequences that rewrite a terminal or a log."""

from __future__ import annotations

import re
import unicodedata

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
