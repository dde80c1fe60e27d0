"""Converts a value to text by one rule, whatever type a file or parser gives it, so that two files of a table agree.

Whole numbers have no fraction (`1` for 1.0), dates and times no zeros that say nothing (`2020-01-01` for its midnight),
truth is `true` or `false`; a text is what it is.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
import math
import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.names import WHOLE_NUMBER

_INT64_END = 2.0**63
EXACT_FLOATS = {32: 2.0**24, 64: 2.0**53}
"""From this value on, a float of so many bits cannot distinguish neighbouring whole numbers."""
_MIDNIGHT = r" 00:00:00$"
_WHOLE = re.compile(WHOLE_NUMBER)


def text_of_value(value: Any) -> str:
    """Return the text of a value parsed by Python, empty for NaN; lists and objects become JSON."""
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() else repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def whole_text(text: str) -> str:
    """`1` for the text `1.0`, which programs write for whole numbers beside a missing one."""
    found = _WHOLE.match(text)
    return found[1] if found else text


def value_texts(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """A column's values as strings, null for NaN; None if its type has no texts, such as bytes and lists."""
    column = plain_texts(column)
    kind = column.type
    if pa.types.is_float16(kind):
        return None  # Arrow casts them to no other type
    if pa.types.is_floating(kind):
        return _float_texts(column)
    if pa.types.is_decimal(kind):
        return whole_texts(_without_zeros(column.cast(pa.string())))
    if pa.types.is_timestamp(kind):
        return _time_texts(column)
    if pa.types.is_time(kind):
        return _without_zeros(column.cast(pa.string()))
    if pa.types.is_date64(kind):
        column = column.cast(pa.date32())
    is_plain = (
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_null(kind)
    )
    return column.cast(pa.string()) if is_plain else None


def whole_texts(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """`whole_text` of each."""
    return pc.replace_substring_regex(texts, WHOLE_NUMBER, r"\1")


def are_inexact(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A mask of floats so large that they may be the rounded ones of other whole numbers."""
    if not pa.types.is_floating(column.type) or pa.types.is_float16(column.type):
        return pa.chunked_array([pa.repeat(False, len(column))])
    return pc.fill_null(pc.greater_equal(pc.abs(_finite(column)), EXACT_FLOATS[column.type.bit_width]), False)


def plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without dictionaries, its texts as `string`."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string()) if pa.types.is_large_string(column.type) else column


def _time_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if kind.tz:
        # As an instant: files of one table may name several zones.
        instants = column.cast(pa.int64()).cast(pa.timestamp(kind.unit))
        return pc.binary_join_element_wise(_without_zeros(instants.cast(pa.string())), "Z", "")
    return pc.replace_substring_regex(_without_zeros(column.cast(pa.string())), _MIDNIGHT, "")


def _float_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = column.cast(pa.float64())
    is_whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), _INT64_END))
    texts = pc.if_else(is_whole, numbers, pa.scalar(None, pa.float64())).cast(pa.int64()).cast(pa.string())
    is_other = pc.and_(numbers.is_valid(), pc.invert(pc.or_(pc.fill_null(is_whole, False), pc.is_nan(numbers))))
    is_other = pc.fill_null(is_other, False)
    if not pc.any(is_other, min_count=0).as_py():
        return texts
    # Arrow writes 123456789012.5 as 1.234567890125e+11, and the shortest digits depend on the width of the float.
    written = [text_of_value(float(str(each))) for each in column.filter(is_other).to_numpy()]
    return pa.chunked_array(
        [pc.replace_with_mask(texts.combine_chunks(), is_other.combine_chunks(), pa.array(written, pa.string()))]
    )


def _finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = column.cast(pa.float64())
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))


def _without_zeros(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without the zeros at the end of a fraction."""
    texts = pc.replace_substring_regex(texts, r"\.0+$", "")
    return pc.replace_substring_regex(texts, r"(\.\d*[1-9])0+$", r"\1")
