"""Detects how a CSV file is written: its delimiter, its names, and spaces around its values."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

_MAX_HEADER_BYTES = 1 << 20
_DELIMITERS = (",", ";", "\t", "|")
_NAMED_DELIMITER = re.compile(rb'"?sep=(.)"?\r?\n')
_HEADER = re.compile(rb'(?:[^"\r\n]+|"[^"]*")*')
_QUOTED = r'^"(.*)"$'


@dataclass(frozen=True, slots=True)
class TextForm:
    """The form of a table's lines."""

    delimiter: str
    names: tuple[str, ...]
    """The columns' names as they are written, with the spaces around them; empty if the first line does not parse."""

    def tidied(self, rows: pa.Table) -> pa.Table:
        """Rows without the spaces around names; if `, ` stands between the names, also around the values."""
        if rows.column_names == [name.strip() for name in rows.column_names]:
            return rows
        names = _stripped(pa.chunked_array([pa.array(rows.column_names)])).to_pylist()
        return pa.table([_stripped(column) for column in rows.columns], names=names)


def text_form(stream: io.BufferedReader, usual_delimiter: str) -> TextForm:
    """Detect the form of a table from its beginning; a first line `sep=;`, as some spreadsheets want it, is skipped.

    Of delimiters that are in the line of names, outside of quotes, it is the most frequent; the usual one if none is.
    """
    named = _NAMED_DELIMITER.match(stream.peek(_MAX_HEADER_BYTES))
    if named:
        stream.read(named.end())
    header = _header(stream.peek(_MAX_HEADER_BYTES).lstrip(b"\r\n"))
    bare = re.sub(rb'"[^"]*"', b"", header)
    most_frequent = max((usual_delimiter, *_DELIMITERS), key=lambda each: bare.count(each.encode()))
    delimiter = named[1].decode() if named else most_frequent
    try:
        options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        first = pa_csv.read_csv(io.BytesIO(header + b"\n"), parse_options=options)
    except pa.ArrowInvalid:
        return TextForm(delimiter, ())
    return TextForm(delimiter, tuple(first.column_names))


def _header(head: bytes) -> bytes:
    """The line of names; a name in quotes may have several lines."""
    found = _HEADER.match(head)
    is_whole = found is not None and not head.startswith(b'"', found.end())
    return found[0] if found and is_whole else re.split(rb"[\r\n]", head, maxsplit=1)[0]


def _stripped(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without the spaces around a value, and then without its quotes: `a, "b"` has a space before the quote."""
    texts = pc.utf8_trim_whitespace(texts)
    is_quoted = pc.match_substring_regex(texts, _QUOTED)
    return pc.if_else(is_quoted, pc.replace_substring(pc.utf8_slice_codeunits(texts, 1, -1), '""', '"'), texts)
