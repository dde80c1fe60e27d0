"""Reads an image's class from one value: a text or a number of a record, or of a member beside the image."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from etl.sources.names import class_name_of
from etl.sources.value_text import text_of_value

_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def text_of(data: bytes) -> str | None:
    """The text of a file or feature without a byte order mark and spaces around it; None if it is not UTF-8 or 16."""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8-sig")
    try:
        return data.decode(encoding).strip().strip("\0")
    except UnicodeDecodeError:
        return None


def class_of(values: Sequence[Any], name: str) -> tuple[str | None, str]:
    """The class that a label's values name, or None and why they name none; `name` is that of the label."""
    text, problem = single_text(values, name)
    found = class_name_of(text or "")
    return (found, "") if found else (None, problem or f"no {name}")


def single_text(values: Sequence[Any], name: str) -> tuple[str | None, str]:
    """The only value as a text, whole numbers without a fraction; or None and why there is none."""
    if len(values) > 1:
        several = f"{name} has {len(values)} values, but a class is one value"
        return None, f'{several}; source.label_kind = "multi_label" or "float_vector" takes all'
    value = values[0] if values else None
    if isinstance(value, list):
        return single_text(value, name) if value else (None, f"{name} is an empty list")
    if isinstance(value, bytes | memoryview):
        value = text_of(bytes(value))
        if value is None:
            return None, f"{name} is not UTF-8"
    if isinstance(value, float) and not value.is_integer():
        return None, f'{name} is {value}, which is no class; source.label_kind = "float" takes numbers'
    if isinstance(value, dict):
        return None, f"{name} is an object; source.label_field may name a field of it"
    text = "" if value is None else text_of_value(value).strip()
    return (text, "") if text else (None, f"no {name}")
