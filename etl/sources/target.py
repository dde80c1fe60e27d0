"""Reads labels that are not a single class as a column of values, and checks them against `source.label_kind`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from etl.sources.names import class_name_of, is_class_name
from shardmill.printable import printable
from shardmill.values import LabelKind

# What the column is read as; a vector's type gets its length from the first one.
_READ_AS: dict[LabelKind, str] = {"multi_label": "list<string>", "float": "float32", "float_vector": "list<float32>"}


class Target:
    """One source's labels of a kind other than `class`."""

    def __init__(self, kind: LabelKind) -> None:
        self.read_as = _READ_AS[kind]
        self._kind: LabelKind = kind
        self._size = 0

    @property
    def type(self) -> str:
        """Type of the labels so far: `list<string>`, `float32` or `float32[N]`; empty before the first vector."""
        if self._kind == "float_vector":
            return f"float32[{self._size}]" if self._size else ""
        return self.read_as

    def named(self, column: pa.Array, class_names: Sequence[str]) -> pa.Array:
        """Lists of class numbers as lists of names, if the file has names; a number without one makes its row null."""
        is_numbers = pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type)
        if self._kind != "multi_label" or not class_names or not is_numbers:
            return column
        names = dict(enumerate(class_names))
        lists = [each and [names.get(number) for number in each] for each in column.to_pylist()]
        return pa.array([None if each and None in each else each for each in lists], pa.list_(pa.string()))

    def prepared(self, value: Any) -> Any:
        """A text of several class names as a list: JSON, or names with `|` between them."""
        if self._kind != "multi_label" or not isinstance(value, str):
            return value
        if not value.strip():
            return None
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [name.strip() for name in value.split("|") if name.strip()]

    def checked(self, value: Any) -> Any:
        """The label as it is kept: class names sorted, each once. Raises ValueError that says what is wrong."""
        if value is None:
            raise ValueError("no label")
        if self._kind == "multi_label":
            odd = next((name for name in value if not is_class_name(class_name_of(name))), None)
            if odd is not None:
                raise ValueError(f"{printable(odd[:60])!r} is no class name")
            return sorted(set(map(class_name_of, value)))
        numbers = value if isinstance(value, list) else [value]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("not finite")
        if self._kind == "float_vector":
            self._size = self._size or len(numbers)
            if not numbers or len(numbers) != self._size:
                raise ValueError(f"a label of {len(numbers)} numbers, expected {self._size or 'at least one'}")
        return value


def class_names_of(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """The names that Hugging Face's `ClassLabel`, or a list of them, keeps in the file's metadata; empty without.

    `objects.category` is a field of a struct, or of a list of structs.
    """
    try:
        text = (schema.metadata or {}).get(b"huggingface", b"{}")
        feature = {"feature": json.loads(text).get("info", {}).get("features", {})}
        for name in [column] if column in feature["feature"] else column.split("."):
            feature = _of_elements(_of_elements(feature).get(name, {}))
        names = feature.get("names", ()) if feature.get("_type") == "ClassLabel" else ()
        return tuple(str(name) for name in names)
    except (ValueError, AttributeError, TypeError, IndexError):
        return ()


def _of_elements(feature: Any) -> Any:
    """Of a list's elements: `[{...}]` in older files, and a feature with the type of its elements in newer ones."""
    if isinstance(feature, list):
        return feature[0]
    return feature.get("feature", feature)
