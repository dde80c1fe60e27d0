"""Reads the columns of `source.extra_columns`, with one type for each column across all files."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.annotations import BoxColumns
from etl.sources.columns import Target, class_names_of, is_there_once, text_of_value, value_texts
from shardmill.errors import UsageError
from shardmill.typed_columns import ARROW_TYPES, LABEL, MASK, MASK_TYPE, encode_values, parse_extra, scalar_of
from shardmill.values import Rejection, RejectReason, SourceImage, SourceLabelKind, Value
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import BoxesConfig, SourceConfig

_INT64 = 1 << 63
_INTEGERS = "int64"


@dataclass(frozen=True, slots=True)
class _Seen:
    """A type, and what had it first."""

    type: str
    where: str


class ExtraColumns:
    """The values of a source's extra columns as texts. It knows each column's type: given, or of the first value."""

    def __init__(
        self,
        configured: Sequence[str],
        label_kind: SourceLabelKind = "class",
        boxes: BoxesConfig | None = None,
        *,
        has_mask: bool = False,
    ) -> None:
        self._has_mask = has_mask
        self.boxes = BoxColumns(boxes) if boxes is not None and boxes.field else None
        """They are columns, and the classes of boxes are the labels."""
        self.target = None if label_kind in ("class", "none") else Target(label_kind)
        """Labels that are not classes; they are a column, named `LABEL`."""
        self.given = dict(map(parse_extra, configured))
        """Name -> type, empty if the values tell it."""
        if self.target is not None:
            self.given[LABEL] = self.target.read_as
        self._seen = {name: _Seen(kind, "source.extra_columns") for name, kind in self.given.items() if kind}

    @classmethod
    def of_source(cls, config: SourceConfig) -> ExtraColumns:
        """Of all that a source's settings ask for beside the images."""
        kind = config.without_box_labels.label_kind
        return cls(config.extra_columns, kind, config.boxes, has_mask=config.mask_field != "")

    @property
    def types(self) -> dict[str, str]:
        """Types of the columns that had a value so far."""
        types = {name: seen.type for name, seen in self._seen.items()}
        if self.target is not None:
            types[LABEL] = self.target.type
        types |= {} if self.boxes is None else self.boxes.types
        types |= {MASK: MASK_TYPE} if self._has_mask else {}
        return {name: kind for name, kind in types.items() if kind}

    @property
    def has_values(self) -> bool:
        """Whether an image has a text of values."""
        return bool(self.given) or self.boxes is not None or self._has_mask

    @property
    def own_names(self) -> tuple[str, ...]:
        """The source's columns that are read, but that of labels."""
        names = (name for name in self.given if name != LABEL)
        return (*names, *(() if self.boxes is None else self.boxes.own_names))

    def of_rows(
        self, rows: pa.Table, where: str, label: str | None = None, masks: pa.Array | None = None
    ) -> tuple[pa.Array, pa.Array]:
        """The text of each row of a table, and its problem, null if it has none; a column that it lacks is null.

        `label` is the table's own name of the column of labels, if they are not classes; `masks` are the rows' files.

        Raises UsageError for a column of another type than in the files before, or of one that no dataset has.
        """
        if self.target is not None and label is None:
            raise UsageError(
                f"{printable(where)} has the columns {', '.join(map(printable, rows.column_names[:20]))}",
                "expected a column of labels, because source.label_kind is set", "name it with source.label_field",
            )  # fmt: skip
        problems: list[str | None] = [None] * rows.num_rows
        columns = {}
        for name in self.given:
            own_name = label if name == LABEL else name
            own = [each for each in rows.column_names if each == own_name]
            found = plain(rows.column(own[0])) if own and is_there_once(own) else pa.nulls(rows.num_rows)
            if name == LABEL and self.target is not None:
                found = self.target.named(found, class_names_of(rows.schema, label or ""))
            columns[name] = self._column(name, found, where, problems)
        if masks is not None:
            columns[MASK] = masks.to_pylist()
        of_rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        if self.boxes is not None:
            boxes = self.boxes.of_rows(rows, where, problems)
            of_rows = [values | more for values, more in zip(of_rows or [{}] * rows.num_rows, boxes, strict=True)]
        texts = [encode_values(values) for values in of_rows]
        return pa.array(texts, pa.string()), pa.array(problems, pa.string())

    def of_record(
        self, image: SourceImage, values: Mapping[str, Any], types: Mapping[str, str] | None = None
    ) -> SourceImage | Rejection:
        """The image with the text of its record, or why it is refused. `types` says what the values themselves do not.

        `values` also has the record's boxes, by the names of `BoxColumns.of_record`, and as `MASK` the place of its
        mask. Raises UsageError as `of_rows` does.
        """
        problems: list[str | None] = [None]
        found: dict[str, Value] = {}
        for name in self.given:
            value = values.get(name)
            kind = (types or {}).get(name) or _type_of(value)
            found[name] = self._values(name, [value], self._type(name, kind, image.container), problems)[0]
        try:
            found |= {} if self.boxes is None else self.boxes.of_record(values)
        except (ValueError, TypeError) as error:
            problems[0] = problems[0] or str(error)
        if self._has_mask:
            found[MASK] = values.get(MASK)
            problems[0] = problems[0] or (None if values.get(MASK) else "no mask")
        if problems[0]:
            return image.rejected(RejectReason.BAD_ROW, problems[0], "list")
        return replace(image, extra=encode_values(found))

    def _column(self, name: str, column: pa.Array, where: str, problems: list[str | None]) -> list[Value]:
        kind = _name_of(column.type)
        if kind is None and not self.given[name]:
            raise UsageError(
                f"the column {name!r} of {printable(where)} is {column.type}",
                f"expected one of {', '.join(ARROW_TYPES)}",
                f'remove it from source.extra_columns, or give its type: "{name}:string"',
            )
        wanted = self._type(name, kind or "", where)
        is_list_alike = pa.types.is_list(column.type) == wanted.startswith("list<")
        values = _texts_of(column) if scalar_of(wanted) == "string" and is_list_alike else None
        try:
            is_text_of_target = name == LABEL and self.target is not None and kind == "string"
            is_cast = wanted and not is_text_of_target
            values = values or (column.cast(ARROW_TYPES[wanted]) if is_cast else column).to_pylist()
        except pa.ArrowException:
            values = column.to_pylist()
        return self._values(name, values, wanted, problems)

    def _type(self, name: str, kind: str, where: str) -> str:
        """The column's type, now that a value of type `kind` (empty: of any) was found; empty if none was yet."""
        seen = self._seen.get(name)
        if seen is None and kind:
            seen = self._seen[name] = _Seen(kind, where)
        if seen is None or not kind or self.given[name] or kind == seen.type:
            return seen.type if seen is not None else ""
        raise UsageError(
            f"the column {name!r} is {kind} in {printable(where)} and {seen.type} in {printable(seen.where)}",
            "expected one type in all files",
            f'give its type in source.extra_columns: "{name}:{_common(kind, seen.type)}"',
        )

    def _values(self, name: str, values: list[Any], kind: str, problems: list[str | None]) -> list[Value]:
        """The values as `kind`; what is none is null, and a problem of its row."""
        converted: list[Value] = []
        target = self.target if name == LABEL else None
        for place, value in enumerate(values):
            try:
                value = _converted(value if target is None else target.prepared(value), kind)
            except (ValueError, TypeError, OverflowError, RecursionError):
                converted.append(None)
                problems[place] = problems[place] or f"{name} = {printable(repr(value)[:60])} is no {kind}"
                continue
            try:
                converted.append(value if target is None else target.checked(value))
            except ValueError as error:
                converted.append(None)
                problems[place] = problems[place] or str(error)
        return converted


def plain(column: pa.ChunkedArray) -> pa.Array:
    """A column without dictionaries, in one piece."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        column = column.cast(kind.value_type)
    elif pa.types.is_list(kind) and pa.types.is_dictionary(kind.value_type):
        column = column.cast(pa.list_(kind.value_type.value_type))
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _name_of(kind: pa.DataType) -> str | None:
    """The name of the type that holds every value of `kind`: empty if there are none but null, None if no type does."""
    if pa.types.is_null(kind):
        return ""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _name_of(kind.value_type)
        return f"list<{inner}>" if inner and not inner.startswith("list<") else inner and None
    if pa.types.is_integer(kind):
        return _INTEGERS
    if pa.types.is_float16(kind) or pa.types.is_float32(kind):
        return "float32"
    if pa.types.is_float64(kind):
        return "float64"
    # A date of JSON or CSV is a text, too.
    is_time = pa.types.is_date(kind) or pa.types.is_timestamp(kind) or pa.types.is_time(kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or is_time:
        return "string"
    return "bool" if pa.types.is_boolean(kind) else None


def _texts_of(column: pa.Array) -> list[Any] | None:
    """The values of a column as texts, or lists of them; None for types that have none, and for texts themselves."""
    kind = column.type
    if not pa.types.is_list(kind):
        texts = None if pa.types.is_string(kind) else value_texts(pa.chunked_array([column]))
        return None if texts is None else texts.to_pylist()
    inner = _texts_of(pc.list_flatten(column))
    if inner is None:
        return None
    flat = iter(inner)
    lengths = pc.list_value_length(column).to_pylist()
    return [None if length is None else [next(flat) for _ in range(length)] for length in lengths]


def _type_of(value: Any) -> str:
    """The type of a value of Python; empty if it says none."""
    if isinstance(value, list):
        inner = {_type_of(each) for each in value}
        return f"list<{inner.pop()}>" if len(inner) == 1 and "" not in inner else "list<float64>" if inner else ""
    names = {bool: "bool", int: _INTEGERS, float: "float64", str: "string"}
    return names.get(type(value), "")


def _common(first: str, second: str) -> str:
    """A type that may hold the values of both, for a message."""
    scalars = {scalar_of(first), scalar_of(second)}
    scalar = "float64" if scalars <= {_INTEGERS, "float32", "float64"} else "string"
    return f"list<{scalar}>" if "list<" in first + second else scalar


def _converted(value: Any, kind: str) -> Value:
    """`value` as a type. Raises ValueError or TypeError if it is none of its values."""
    if value is None or not kind:
        return value
    if isinstance(value, str) and kind != "string":
        if not value.strip():
            return None
        value = json.loads(value)  # a table without types, such as CSV
    if kind.startswith("list<"):
        if not isinstance(value, list) or any(each is None for each in value):
            raise ValueError
        return [_scalar(each, scalar_of(kind)) for each in value]
    return _scalar(value, kind)


def _scalar(value: Any, kind: str) -> int | float | str | bool:
    if kind == "string":
        if isinstance(value, list | dict | bytes):
            raise TypeError
        return text_of_value(value)
    if kind == "bool" and value in (0, 1):
        return bool(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or kind == "bool":
        raise TypeError
    if kind == _INTEGERS:
        if value != int(value) or not -_INT64 <= value < _INT64:
            raise ValueError
        return int(value)
    if kind == "float32" and math.isfinite(value):
        value = np.float32(value).item()
    return float(value)
