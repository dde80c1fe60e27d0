"""Detects labels in tables beside images: one column names the images, and another may name their classes."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from etl.sources.label_signs import has_fractions, has_word, is_measure, names_labels
from etl.sources.names import IMAGE_SUFFIXES, hidden_folder_of
from etl.sources.text_form import text_form
from shardmill.printable import printable

HEAD_BYTES = 1 << 16
_SUFFIXES = (".csv", ".tsv")
_MAX_TABLES = 4
_MAX_IMAGES = 10_000
_MIN_ROWS = 4
_NUM_NAMED = 3
_IMAGE_WORDS = frozenset(
    {"uri", "url", "path", "file", "filename", "image", "images", "img", "photo", "picture", "id", "ids"}
)


class TableSigns:
    """The heads of the first tables that a listing meets, and the names of its first images."""

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._images: set[str] = set()

    def wants(self, key: str) -> bool:
        """Whether the first `HEAD_BYTES` of a file are to be taken in."""
        is_table = key.lower().endswith(_SUFFIXES) and not hidden_folder_of(key)
        return is_table and len(self._heads) < _MAX_TABLES

    def take(self, key: str, head: bytes) -> None:
        """Take in how a table begins; it is `HEAD_BYTES` long if there is more of it."""
        self._heads[key] = head

    def look(self, images: Iterable[str]) -> None:
        """Take in the names of images."""
        for name in images:
            if len(self._images) >= _MAX_IMAGES:
                return
            self._images.add(_stem_of(name))

    def found(self) -> Iterator[str]:
        """A phrase for each table that names the images beside it, and something that may be their class."""
        for key, head in self._heads.items():
            columns = self._label_columns(_rows_of(head, key))
            if columns:
                named = ", ".join(repr(printable(name)) for name in columns[:_NUM_NAMED])
                place = " in ".join(repr(printable(part)) for part in reversed(key.split("\0")))
                yield (
                    f"{place} names the images, with {named} for each (to use it, set it as the source: "
                    'source.kind = "table", source.uri = its path)'
                )

    def _label_columns(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """The columns that may name classes; none if no column names images."""
        if not rows:
            return []
        header = [name.strip() for name in rows[0]]
        columns = list(zip(*(row for row in rows if len(row) == len(header)), strict=True))
        by_header = {place for place, name in enumerate(header) if _names_images(name)}
        by_values = (place for place, values in enumerate(columns) if self._are_images(values))
        image = next(iter(sorted(by_header)), None)
        image = next(by_values, None) if image is None else image
        if image is None:
            return []
        others = (place for place in range(len(header)) if place not in by_header and place != image)
        return [header[place] for place in others if _may_be_classes(header[place], columns[place][1:])]

    def _are_images(self, values: Sequence[str]) -> bool:
        filled = [value for value in values if value.strip()]
        known = (os.path.splitext(value.strip())[1].lower() in IMAGE_SUFFIXES or _stem_of(value) in self._images
                 for value in filled)  # fmt: skip
        return bool(filled) and sum(known) * 2 >= len(filled)


def _names_images(name: str) -> bool:
    return has_word(name, _IMAGE_WORDS) and not names_labels(name) and not is_measure(name)


def _may_be_classes(name: str, values: Sequence[str]) -> bool:
    """Whether a column is named as labels are, or has values of which some are there twice."""
    filled = [value.strip() for value in values if value.strip()]
    if not name or is_measure(name):
        return False
    repeats = len(filled) < _MIN_ROWS or len(set(filled)) < len(filled)
    return names_labels(name) or (repeats and not has_fractions(filled))


def _rows_of(head: bytes, key: str) -> list[list[str]]:
    """The rows of a table's beginning, its line of names first; none if it is not text."""
    text = _decoded(head)
    if len(head) >= HEAD_BYTES:
        # The last line is cut.
        text = text.rpartition("\n")[0]
    stream: Any = io.BufferedReader(io.BytesIO(text.encode()))
    delimiter = text_form(stream, "\t" if key.lower().endswith(".tsv") else ",").delimiter
    try:
        return [row for row in csv.reader(io.StringIO(stream.read().decode(), newline=""), delimiter=delimiter) if row]
    except csv.Error:
        return []


def _decoded(head: bytes) -> str:
    """Empty if it is not text."""
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return head.decode("utf-16", "ignore")
    if b"\0" in head:
        return ""
    try:
        # A letter may be cut at the end.
        return codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError:
        return head.decode("latin-1")


def _stem_of(name: str) -> str:
    return os.path.splitext(re.split(r"[/\\\0]", name.strip())[-1])[0]
