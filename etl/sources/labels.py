"""Converts a column of any type to class names: equal values are one class in every table format."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.names import NO_LABEL
from etl.sources.value_text import are_inexact, plain_texts, value_texts, whole_texts
from shardmill.errors import UsageError

# Beyond it, a float64 no longer tells two whole numbers apart.
_MAX_EXACT = float(1 << 53)


def as_labels(column: pa.ChunkedArray, class_names: tuple[str, ...], where: str) -> pa.ChunkedArray:
    """Class names as strings, null if there is none: numbers by `class_names`, else as their digits.

    Raises UsageError for a column that cannot name classes.
    """
    column = plain_texts(column)
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        # What pandas makes of whole numbers beside a missing one.
        column, kind = _whole_numbers(column, where), pa.int64()
    if pa.types.is_integer(kind) and class_names:
        numbers = column.cast(pa.int64())
        is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(class_names)))
        # -1 means "no label" in the test splits of Hugging Face's datasets.
        return pa.chunked_array(
            [pa.array(class_names, pa.string()).take(chunk) for chunk in pc.if_else(is_named, numbers, None).chunks],
            pa.string(),
        )
    texts = value_texts(column)
    if texts is None:
        raise _no_classes(kind, where)
    return _class_names(texts)


def _class_names(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """`class_name_of` of each text, null for an empty one; done once for each different text."""
    encoded = texts.combine_chunks().dictionary_encode()
    names = whole_texts(pc.utf8_trim_whitespace(encoded.dictionary))
    names = pc.if_else(pc.match_substring_regex(names, NO_LABEL), pa.scalar(None, pa.string()), names)
    return pa.chunked_array([names.take(encoded.indices)], pa.string())


def _whole_numbers(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """int64, null for what is not finite. Raises UsageError if a number is not whole."""
    kind = column.type
    numbers = column.cast(pa.float64())
    numbers = pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))
    is_whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less_equal(pc.abs(numbers), _MAX_EXACT))
    is_whole = pc.and_(is_whole, pc.invert(are_inexact(column)))
    if not pc.all(is_whole, min_count=0).as_py():
        raise _no_classes(kind, where)
    return numbers.cast(pa.int64())


def _no_classes(kind: pa.DataType, where: str) -> UsageError:
    return UsageError(
        f"the labels of {where} are {kind}", "expected strings or whole numbers, one class for each image",
        "choose another column with source.label_field, or another source.label_kind (docs/sources.md)",
    )  # fmt: skip
