"""What moves with the pixels: the boxes of rows and records, and where an image's mask lies.

A listing carries both in coordinates of the source; `etl/units/after_decoding.py` moves them, and a task reads the
mask behind its image: from a file of its own, or beside the image in its row, record or archive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import pyarrow as pa

from etl.sources.columns import class_names_of, text_of_value
from etl.sources.names import class_name_of, is_class_name
from shardmill.errors import UsageError
from shardmill.typed_columns import BOX_COLUMNS, BOX_LABELS, BOXES, LABEL, NUM_SIDES
from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, Rejection, SourceImage, Value
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import BoxesConfig
    from etl.sources import SourceReader


ANNOTATED_SIZE = "annotated_size"
"""Beside the boxes of a listed image: width and height of the image that they were drawn in, where the source says."""
SIZE_FIELDS = (f"{ANNOTATED_SIZE}.width", f"{ANNOTATED_SIZE}.height")
"""Width and height among the values of a record."""
_SIZE_COLUMNS = ("width", "height")


class BoxColumns:
    """The boxes of one source."""

    def __init__(self, config: BoxesConfig) -> None:
        self._config = config
        self._has_labels = config.labels_field != ""

    @property
    def types(self) -> dict[str, str]:
        """The columns that they become in a dataset; those of labels only if boxes have some."""
        return box_types(has_labels=self._has_labels)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The table's columns that hold them: of a struct's fields, the column of the struct."""
        fields = (self._config.field, self._config.labels_field)
        names = (name for field in fields if field for name in (field, field.partition(".")[0]))
        return tuple(dict.fromkeys([*names, *_SIZE_COLUMNS]))

    def of_rows(self, rows: pa.Table, where: str, problems: list[str | None]) -> list[dict[str, Value]]:
        """The values of each row, in place of `problems` what is wrong with it.

        Raises UsageError if the table has no such column.
        """
        boxes = _column(rows, self._config.field, "field", where)
        labels, names = None, ()
        if self._has_labels:
            labels = _column(rows, self._config.labels_field, "labels_field", where)
            names = class_names_of(rows.schema, self._config.labels_field)
        sizes = [rows.column(name).to_pylist() if name in rows.column_names else None for name in _SIZE_COLUMNS]
        found: list[dict[str, Value]] = []
        for row, given in enumerate(boxes):
            values: dict[str, Value] = {}
            try:
                named = None if labels is None else _named(_parsed(labels[row]) or [], names)
                values = self._values(given, named, [each[row] for each in sizes if each is not None])
            except (ValueError, TypeError) as error:
                problems[row] = problems[row] or str(error)
            found.append(values)
        return found

    def of_record(self, record: Mapping[str, Any]) -> dict[str, Value]:
        """The values of a record that has its boxes as `BOXES`, their classes as `BOX_LABELS`, and `SIZE_FIELDS`.

        Raises ValueError that says what is wrong with them.
        """
        labels = _parsed(record.get(BOX_LABELS)) or [] if self._has_labels else None
        return self._values(record.get(BOXES), labels, [record.get(name) for name in SIZE_FIELDS])

    def _values(self, given: Any, labels: Sequence[Any] | None, size: list[Any]) -> dict[str, Value]:
        if (boxes := _parsed(given)) is None:
            raise ValueError(f"no {self._config.field} beside it; an image without boxes has an empty list")
        return box_values(boxes, labels, self._config.format) | _size_of(size)


def box_types(*, has_labels: bool) -> dict[str, str]:
    """Name -> type of the columns of boxes, and of the labels that an image has by them."""
    return {**BOX_COLUMNS, LABEL: "list<string>"} if has_labels else {BOXES: BOX_COLUMNS[BOXES]}


def box_values(boxes: Sequence[Any], labels: Sequence[Any] | None, box_format: str) -> dict[str, Value]:
    """The values of an image with these boxes: lists of four numbers, or one list of all, as datasets store them.

    Raises ValueError that says what is wrong with them.
    """
    if boxes and all(map(is_number, boxes)):
        boxes = [boxes[first : first + NUM_SIDES] for first in range(0, len(boxes), NUM_SIDES)]
    sides: list[float] = []
    for number, box in enumerate(boxes):
        if not isinstance(box, list | tuple) or len(box) != NUM_SIDES or not all(map(is_number, box)):
            raise ValueError(f"box {number} is {printable(repr(box)[:60])}, expected four numbers")
        x0, y0, x1, y1 = map(float, box)
        if box_format == "xywh":
            x1, y1 = x0 + x1, y0 + y1
        if x1 < x0 or y1 < y0:
            hint = (
                "" if box_format == "xywh" else '; if it is a corner with width and height, set boxes.format = "xywh"'
            )
            raise ValueError(f"box {number} is {list(box)}, which ends before it begins{hint}")
        sides += x0, y0, x1, y1
    if any(sides) and all(0 <= side <= 1 for side in sides):
        raise ValueError("its boxes lie in the first pixel: expected pixels, not shares of width and height")
    values: dict[str, Value] = {BOXES: list(sides)}
    if labels is not None:
        if len(labels) != len(boxes):
            raise ValueError(f"{len(boxes)} boxes and {len(labels)} labels, expected one for each box")
        named = [
            class_name_of(text_of_value(label)) if isinstance(label, str | int | float) else "" for label in labels
        ]
        odd = next((name for name in named if not is_class_name(name)), None)
        if odd is not None:
            raise ValueError(f"{printable(odd[:60])!r} is no class name of a box" if odd else "a box without a label")
        values |= {BOX_LABELS: list(named), LABEL: sorted(set(named))}
    return values


def _column(rows: pa.Table, field: str, key: str, where: str) -> list[Any]:
    name, _, inner = field.partition(".")
    if field in rows.column_names:
        return rows.column(field).to_pylist()
    if name not in rows.column_names:
        raise UsageError(
            f"source.boxes.{key} = {field!r} is not a column of {printable(where)}",
            f"expected one of {', '.join(map(printable, rows.column_names[:20]))}",
            f"correct source.boxes.{key}",
        )
    values = rows.column(name).to_pylist()
    for part in inner.split(".") if inner else ():
        values = [_field_of(value, part) for value in values]
    return values


def _field_of(value: Any, name: str) -> Any:
    """Of a struct, or of each struct of a list."""
    if isinstance(value, list):
        return [_field_of(each, name) for each in value]
    return value.get(name) if isinstance(value, Mapping) else None


def _parsed(value: Any) -> list[Any] | None:
    """A list or null, and from its JSON in a table without types, such as CSV."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError):
            raise ValueError(f"{printable(repr(value)[:60])} is no JSON list of boxes or of their labels") from None
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{printable(repr(value)[:60])} is no list of boxes or of their labels")
    return value


def _named(labels: list[Any], names: Sequence[str]) -> list[Any]:
    """Class numbers as the names that the file keeps for them, None for a number without one; others as they are."""
    known = dict(enumerate(names))
    return [known.get(label) if names and isinstance(label, int) else label for label in labels]


def _size_of(sides: list[Any]) -> dict[str, Value]:
    """Of columns `width` and `height`, where the table has both."""
    if len(sides) != len(_SIZE_COLUMNS) or any(side is None or side == "" for side in sides):
        return {}
    try:
        return {ANNOTATED_SIZE: [int(float(side)) for side in sides]}
    except (ValueError, TypeError, OverflowError):
        raise ValueError(f"width and height are {printable(repr(sides)[:60])}, expected whole numbers") from None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether it is one of JSON's that a float can hold."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


# No URI has one.
_BESIDE = "\0"


def in_column(name: str) -> str:
    """A mask in another column of the image's row, or in another feature of its record."""
    return f"{_BESIDE}{name}"


def in_member(name: str, start: int, size_bytes: int) -> str:
    """A mask that is another member of the image's archive."""
    return f"{_BESIDE}{name}{_BESIDE}{start}{_BESIDE}{size_bytes}"


@dataclass(frozen=True, slots=True)
class MaskLocation:
    """The mask of one image."""

    image: SourceImage
    """What the source's reader is given to read it."""
    name: str
    """For a person."""


def mask_location(image: SourceImage, text: str, *, is_in_parts: bool) -> MaskLocation:
    """The place that a listing's text names. `is_in_parts`: whether the image is of one source of several."""
    if text.startswith(_BESIDE):
        name, *numbers = text.removeprefix(_BESIDE).split(_BESIDE)
        container = f"{image.container}{_BESIDE}{name}"
        if not numbers:
            return MaskLocation(replace(image, container=container, size_bytes=UNKNOWN_SIZE), name)
        start, size_bytes = map(int, numbers)
        return MaskLocation(replace(image, container=container, place=start, size_bytes=size_bytes), name)
    # A file of its own, in the part of its image.
    part, separator, _ = image.key.partition("\0")
    container = f"{part}{separator}{text}" if is_in_parts else text
    return MaskLocation(replace(image, container=container, block=NO_BLOCK, size_bytes=UNKNOWN_SIZE), text)


class ReaderOfMasks:
    """Reads images, and the masks beside them by a reader of its own: so both go through a container in its order."""

    num_parallel = 1

    def __init__(self, images: SourceReader, masks: SourceReader) -> None:
        self._images, self._masks = images, masks

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The bytes of an image, or of the mask whose `mask_location` this is."""
        path, of_mask, _ = image.container.partition(_BESIDE)
        return self._masks.read(replace(image, container=path)) if of_mask else self._images.read(image)

    def expect(self, image: SourceImage) -> None:
        """Announce an image."""
        self._images.expect(image)

    def is_there(self, path: str) -> bool:
        """Whether this host sees the container."""
        return self._images.is_there(path)


SEGMENTATIONS = "segmentations"
"""Beside the boxes of a listed image: the text of its segmentations, of which its mask is drawn."""
MAX_VALUE = 255
"""Largest number of a mask; 0 is where there is no object."""


def segmentation_text(value: int, segmentation: str, bbox: Any, *, is_crowd: bool) -> str:
    """The polygons or run lengths of one object, as JSON, beside its box, which it must not leave."""
    return f"[{value},{int(is_crowd)},{json.dumps(bbox)},{segmentation}]"


def joined(segmentations: Iterable[str]) -> str:
    """The segmentations of one image, in the order of the file."""
    return f"[{','.join(segmentations)}]"
