"""What users keep beside their images: extra columns and labels of any kind, in a few types that every format has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from shardmill.errors import IntegrityError

Scalar = int | float | str | bool
Value = Scalar | list[Scalar] | None
"""One value of a column; None for null. A list has no nulls."""

LabelKind = Literal["class", "multi_label", "float", "float_vector"]

_SCALARS = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
ARROW_TYPES: dict[str, pa.DataType] = _SCALARS | {f"list<{name}>": pa.list_(kind) for name, kind in _SCALARS.items()}
"""Every type of a column, by the name that configs and manifests give it."""


@dataclass(frozen=True, slots=True, order=True)
class ExtraColumn:
    """A column that a dataset has beside our own."""

    name: str
    type: str
    """A key of `ARROW_TYPES`."""


def scalar_of(type_name: str) -> str:
    """The type of a list's elements; of any other type the type itself."""
    return type_name.removeprefix("list<").removesuffix(">")


def encode_values(values: Mapping[str, Value]) -> str:
    """One row's values as the text that travels with its source and that its digest covers: equal for equal values."""
    return json.dumps(dict(values), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def decode_values(text: str) -> dict[str, Value]:
    """What `encode_values` was given; nothing for an empty text. Raises IntegrityError for any other text."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the values of a row do not parse: {error}") from None
    if not isinstance(values, dict):
        raise IntegrityError("the values of a row do not parse: they have no names")
    return values
