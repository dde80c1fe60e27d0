"""Detects labels that a source contains but does not use: by the names of columns, and by their values."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.labels import as_labels
from etl.sources.target import class_names_of
from shardmill.errors import UsageError
from shardmill.printable import printable
from shardmill.words import first_of

_LABEL_WORDS = frozenset(
    {
        *("label", "labels", "class", "classes", "classname", "cls", "category", "categories"),
        *("target", "targets", "annotation", "annotations", "species", "breed", "diagnosis"),
    }
)
# Names of columns whose values repeat but are not classes.
_MEASURES = frozenset(
    {
        *("width", "height", "size", "bytes", "channels", "dpi", "format", "license", "licence"),
        *("date", "year", "time", "timestamp", "fold", "split", "subset"),
    }
)
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NUM_NAMED = 4
_MIN_ROWS = 4
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_FRACTION = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
# A class's column: how a cell says whether the image has the class.
_FLAGS = {"0": False, "1": True, "-1": False, "true": True, "false": False}


def names_labels(name: str) -> bool:
    """Whether a column, member or field is named as labels are: `Labels`, `class_id`, `fineLabel`, `lable`."""
    return has_word(name, _LABEL_WORDS) or bool(
        difflib.get_close_matches(name.strip().lower(), ("label", "labels"), n=1, cutoff=0.75)
    )


def has_word(name: str, words: Collection[str]) -> bool:
    """Whether one of the words is in a name: `id` in `imageId` and `image_id`."""
    return any(word.lower() in words for word in _WORDS.findall(name))


def is_measure(name: str) -> bool:
    """Whether a column is named as facts of files are that no one classifies by: `width`, `file_size`."""
    return any(word.lower() in _MEASURES for word in _WORDS.findall(name)[-1:])


def has_fractions(values: Iterable[str]) -> bool:
    """Whether one of the texts is a number that is not written as a whole one."""
    return any(map(_FRACTION.fullmatch, values))


def named_signs(names: Iterable[str], where: str) -> Iterator[str]:
    """A phrase for each of the names that is one of labels; `where` is the file that has them."""
    for name in names:
        if names_labels(name):
            yield f"{printable(where)} has {printable(name)!r}"


def column_signs(schema: pa.Schema, unused: Collection[str], first_rows: pa.Table, where: str) -> tuple[str, ...]:
    """The signs in columns that nothing else uses: in their names, and in the values of those among the first rows."""
    names = [name for field in schema if field.name in unused for name in _names_in(field, schema)]
    values = [place for place, name in enumerate(first_rows.column_names) if name in unused]
    return (*named_signs(names, where), *_value_signs(first_rows.select(values), where))


def _names_in(field: pa.Field, schema: pa.Schema) -> Iterator[str]:
    """Of a column, and of the fields in it: `objects`, `objects.category`."""
    yield field.name if not class_names_of(schema, field.name) else f"{field.name} (ClassLabel)"
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        for inner in (kind.field(place) for place in range(kind.num_fields)):
            yield from _names_in(inner.with_name(f"{field.name}.{inner.name}"), schema)


def _value_signs(rows: pa.Table, where: str) -> Iterator[str]:
    """A phrase for columns of 0 and 1, one for each class, or for columns of few values, each of which may be it."""
    if rows.num_rows < _MIN_ROWS:
        return
    flags = [name for name, column in zip(rows.column_names, rows.columns, strict=True) if _is_flag(column)]
    if len(flags) > 1 and (
        len(flags) == rows.num_columns or len(flags) >= _NUM_NAMED or _is_one_of(rows.select(flags))
    ):
        named = first_of([*map(printable, flags)], _NUM_NAMED)
        yield (
            f"{printable(where)} has a column of 0 and 1 for each class ({named}); write them as one column of names, "
            "with | between several"
        )
        return
    is_alone = rows.num_columns == 1
    repeating = [
        repr(printable(name))
        for name, column in zip(rows.column_names, rows.columns, strict=True)
        if _repeats(column, may_be_numbers=is_alone) and (is_alone or not is_measure(name))
    ]
    if repeating:
        named = first_of(repeating, _NUM_NAMED)
        yield f"{printable(where)} has {named}, whose values repeat like class names"


def _is_flag(column: pa.ChunkedArray) -> bool:
    values = {value.lower() for value in pc.unique(_texts(column)).to_pylist() if value}
    return 1 <= len(values) <= 2 and values <= _FLAGS.keys()


def _is_one_of(flags: pa.Table) -> bool:
    """Whether exactly one column of each row is set."""
    set_flags = pa.array([value for value, is_set in _FLAGS.items() if is_set])
    total = pa.array(np.zeros(flags.num_rows, np.int64))
    for column in flags.columns:
        total = pc.add(total, pc.is_in(pc.utf8_lower(_texts(column)), set_flags).cast(pa.int64()))
    return bool(pc.all(pc.equal(total, 1)).as_py())


def _repeats(column: pa.ChunkedArray, *, may_be_numbers: bool) -> bool:
    values = {value for value in pc.unique(_texts(column)).to_pylist() if value}
    # Days and weights repeat, too.
    is_other = all(map(_DATE.match, values)) or (not may_be_numbers and has_fractions(values))
    return 1 < len(values) <= len(column) // 2 and not is_other


def _texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The values as class names; all null for a type that names no classes."""
    try:
        return as_labels(column, (), "")
    except UsageError:
        return pa.chunked_array([pa.nulls(len(column), pa.string())])
