"""Extra columns and labels of any kind, in the few types that every shard format supports."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shardmill.errors import IntegrityError
from shardmill.values import LabelKind, Value

_SCALARS = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "bool": pa.bool_(),
}
ARROW_TYPES: dict[str, pa.DataType] = _SCALARS | {f"list<{name}>": pa.list_(kind) for name, kind in _SCALARS.items()}
"""Every type of a user's column, by the name that configs and manifests give it."""

BOXES, BOX_LABELS = "boxes", "box_labels"
"""The columns of boxes and of their classes; both have one entry for each box of an image."""
BOX_TYPE, BOX_LABEL_TYPE = "list<box>", "list<class>"
BOX_COLUMNS = {BOXES: BOX_TYPE, BOX_LABELS: BOX_LABEL_TYPE}
MASK, MASK_TYPE = "mask", "png"
"""The column of masks; a row's text has the SHA-256 of its mask in place of it."""
ANNOTATIONS = {**BOX_COLUMNS, MASK: MASK_TYPE}
"""Columns that move with the pixels, and their types."""
NUM_SIDES = 4
"""Numbers of a box: x0, y0, x1, y1 in pixels."""
# Four numbers for each box, one after the other; class numbers. Readers of other tools see plain lists.
_OWN_ARROW_TYPES = {BOX_TYPE: pa.list_(pa.float32()), BOX_LABEL_TYPE: pa.list_(pa.int64()), "png": pa.binary()}
_SCALARS_OF_BOXES = {BOX_TYPE: "float32", BOX_LABEL_TYPE: "int64"}


@dataclass(frozen=True, slots=True, order=True)
class ExtraColumn:
    """A column that a dataset has beside our own."""

    name: str
    type: str
    """A key of `ARROW_TYPES`, or one of `ANNOTATIONS`."""


_COORDINATES = re.compile(
    r"(b|bnd|bounding_?)?box(e?s)?|(bbox_)?[xy]_?(min|max)|bbox_[xywh]|key_?points?|landmarks?|polygons?|segmentations?"
)

LABEL = "label"
"""The column of labels. Labels that are not classes are stored with the extra columns, under this name."""

LABEL_TYPES: dict[LabelKind, str] = {
    "class": "int64", "multi_label": "list<int64>", "float": "float32", "float_vector": "float32[N]"
}  # fmt: skip
"""Stored type of each kind of label; N is the length of all vectors of a dataset."""


def parse_extra(text: str) -> tuple[str, str]:
    """Name and type of an entry of `source.extra_columns`: `NAME` or `NAME:TYPE`. Raises ValueError for others."""
    name, colon, kind = text.rpartition(":")
    if not colon:
        name, kind = kind, ""
    if not name.strip() or (colon and kind not in ARROW_TYPES):
        raise ValueError(f"NAME or NAME:TYPE with a type among {', '.join(ARROW_TYPES)}")
    return name, kind


def names_coordinates(name: str) -> bool:
    """Whether a column is called as places in an image usually are: boxes, points, outlines."""
    return _COORDINATES.fullmatch(name.rpartition(".")[2].lower()) is not None


def are_types_known(columns: Mapping[str, str], ours: Collection[str]) -> bool:
    """Whether a record's columns beside `ours` have types of this module, and labels too."""
    label = columns.get(LABEL, LABEL_TYPES["class"])
    is_label = label in LABEL_TYPES.values() or re.fullmatch(r"float32\[[1-9][0-9]{0,6}\]", label) is not None
    return is_label and all(
        kind in ARROW_TYPES or vector_size(kind) or ANNOTATIONS.get(name) == kind
        for name, kind in columns.items()
        if name not in ours
    )


def vector_size(label_type: str) -> int:
    """The length that `float32[4]` states; 0 for any other type."""
    return int(label_type.removeprefix("float32[").removesuffix("]")) if label_type.startswith("float32[") else 0


def arrow_type(name: str) -> pa.DataType:
    """Return the Arrow type of a column by its type name; a vector is a list."""
    return _OWN_ARROW_TYPES.get(name) or ARROW_TYPES["list<float32>" if vector_size(name) else name]


def names_of(text: str) -> list[str]:
    """The classes of a row with several."""
    names = decode_values(text).get(LABEL)
    return names if isinstance(names, list) else []  # pyright: ignore[reportReturnType]


def stored_labels(texts: Sequence[str], label_type: str, class_names: Sequence[str]) -> list[Value]:
    """Labels as a shard stores them, from the rows' texts: class names as their numbers, in ascending order."""
    labels = [decode_values(text).get(LABEL) for text in texts]
    if label_type != LABEL_TYPES["multi_label"]:
        return labels
    numbers = {name: number for number, name in enumerate(class_names)}
    return [sorted(numbers[name] for name in names) for names in labels]  # pyright: ignore


def stored_values(text: str, columns: Sequence[ExtraColumn], class_numbers: Mapping[str, int]) -> dict[str, Value]:
    """A row's values of the extra columns as a shard stores them: classes as their numbers. None where it has none.

    Of a mask, the SHA-256 of what is stored.
    """
    values = decode_values(text)
    found = {column.name: values.get(column.name) for column in columns}
    for column in columns:
        names = found[column.name]
        if column.type == BOX_LABEL_TYPE and isinstance(names, list):
            found[column.name] = [class_numbers[str(name)] for name in names]
    return found


def label_array(labels: Sequence[Value], label_type: str) -> np.ndarray:
    """Labels that are not classes: float32, shape (N,) or (N, length); or lists of class numbers as objects, (N,).

    Raises IntegrityError for vectors of another length.
    """
    if label_type == LABEL_TYPES["multi_label"]:
        lists_N = np.empty(len(labels), object)
        lists_N[:] = labels
        return lists_N
    try:
        return np.array(labels, np.float32).reshape(len(labels), *label_shape(label_type, 0))
    except (ValueError, TypeError):
        raise IntegrityError(f"a label is not a {label_type}") from None


def label_shape(label_type: str, num_classes: int) -> tuple[int, ...]:
    """The shape of one label in a batch: one number for each class of a multi-label, or each place of a vector."""
    if label_type == LABEL_TYPES["multi_label"]:
        return (num_classes,)
    return (vector_size(label_type),) if vector_size(label_type) else ()


def scalar_of(type_name: str) -> str:
    """The type of a list's elements; of any other type the type itself."""
    return _SCALARS_OF_BOXES.get(type_name) or type_name.removeprefix("list<").removesuffix(">")


def encode_values(values: Mapping[str, Value]) -> str:
    """One row's values as the text that travels with its source and that its digest covers: equal for equal values."""
    return json.dumps(dict(values), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def decode_values(text: str) -> dict[str, Value]:
    """Decode the output of `encode_values`; empty for an empty text. Raises IntegrityError for any other text."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the values of a row do not parse: {error}") from None
    if not isinstance(values, dict):
        raise IntegrityError("the values of a row do not parse: they have no names")
    return values


def as_numpy(column: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """The integers of a column without nulls, over the same memory. They are copied if they lie in several chunks.

    pyarrow's own `to_numpy` and `pa.array` import pandas where it is installed: a quarter of a second before the first
    batch, or a whole one on a busy machine.
    """
    if isinstance(column, pa.ChunkedArray):
        pieces = [as_numpy(chunk) for chunk in column.chunks]
        empty = np.zeros(0, str(column.type))
        return pieces[0] if len(pieces) == 1 else np.concatenate([empty, *pieces])
    assert not column.null_count
    kind = np.dtype(str(column.type))
    data = column.buffers()[1]
    return np.zeros(0, kind) if data is None else np.frombuffer(data, kind)[column.offset : column.offset + len(column)]


def as_arrow(numbers_N: np.ndarray) -> pa.Array:
    """Integers as an Arrow array of 64 bits."""
    return pa.Array.from_buffers(pa.int64(), len(numbers_N), [None, pa.py_buffer(numbers_N.astype(np.int64))])
