"""What a loader delivers beside the pixels and has to move as they move: the boxes and masks of a batch. Its boxes are
all in one array, with where those of each row begin.

Shape legend: N rows, K boxes of all rows, R boxes of one row, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardmill.augment.windows import cut_boxes, cut_mask, upside_down
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_stored_mask
from shardmill.typed_columns import ANNOTATIONS, BOX_COLUMNS, BOX_LABELS, BOXES, MASK, NUM_SIDES

if TYPE_CHECKING:
    from shardmill.augment.draws import Draws
    from shardmill.augment.options import AugmentOptions
    from shardmill.augment.windows import Windows
    from shardmill.formats.rows import RowSchema
    from shardmill.loader.row_source import GatheredRows
    from shardmill.values import Value


def check_annotations(augment: AugmentOptions, schema: RowSchema, columns: Sequence[str] | None) -> None:
    """Raises UsageError if boxes or masks are read that could not follow the augmentation."""
    read = delivered(schema, columns)
    unmoved = augment.unfollowed
    if unmoved and read:
        raise UsageError(
            f"augment {' and '.join(unmoved)}, but the dataset has {' and '.join(read)}",
            "expected crops, mirroring and changes of colour, which boxes and masks follow",
            f"set {' and '.join(f'{name} = 0' for name in unmoved)}, or leave them out with columns=[]",
        )


def delivered(schema: RowSchema, columns: Sequence[str] | None) -> tuple[str, ...]:
    """Of `boxes` and `mask` those that a batch has, if it has these extra columns."""
    own = {**(BOX_COLUMNS if schema.has_boxes else {}), **({MASK: ""} if schema.has_mask else {})}
    read = (BOXES if name in BOX_COLUMNS else name for name in own if columns is None or name in columns)
    return tuple(dict.fromkeys(read))


def boxes_of_batch(
    rows: GatheredRows, schema: RowSchema, is_real_N: np.ndarray, windows: Windows, draws: Draws,
    augment: AugmentOptions,
) -> BatchBoxes:  # fmt: skip
    """The boxes of the real rows of a step, moved as its pixels are."""
    stored = [sides_of(value if is_real else None) for value, is_real in _each(rows, BOXES, is_real_N)]
    counts_N = np.array([len(sides) for sides in stored], np.int64)
    rows_K = np.repeat(np.arange(len(stored)), counts_N)
    cut = cut_boxes(np.concatenate([sides_of(None), *stored]), rows_K, windows, draws, augment)
    labels_K = None
    if schema.has_box_labels:
        of_rows = [numbers_of(value if is_real else None) for value, is_real in _each(rows, BOX_LABELS, is_real_N)]
        labels_K = np.concatenate([numbers_of(None), *of_rows])[cut.is_left_K]
    left_N = np.bincount(rows_K[cut.is_left_K], minlength=len(stored))
    return BatchBoxes(cut.sides_K4, labels_K, np.concatenate([[0], np.cumsum(left_N)]).astype(np.int64))


def decode_masks(
    rows: GatheredRows, is_real_N: np.ndarray, stored_HW: tuple[int, int], windows: Windows, draws: Draws,
    augment: AugmentOptions, masks_NHW: np.ndarray,
) -> None:  # fmt: skip
    """Put the masks of some rows, moved as their pixels are, into a part of a batch's, which is zeros."""
    is_upside_down_N = upside_down(draws, augment)
    masks: Sequence[Any] = rows.extra(MASK)
    for row in np.flatnonzero(is_real_N).tolist():
        if masks[row] is not None:
            mask_HW = decode_stored_mask(masks[row], stored_HW)
            masks_NHW[row] = cut_mask(mask_HW, windows, row, is_upside_down=bool(is_upside_down_N[row]))


def is_annotation(schema: RowSchema, name: str) -> bool:
    """Whether a column is delivered as an array or as `BatchBoxes`, and not as a list of values."""
    return schema.has_annotations and any(
        column.name == name and ANNOTATIONS.get(name) == column.type for column in schema.extra
    )


def stored_annotations(values: Mapping[str, Value], schema: RowSchema, stored_HW: tuple[int, int]) -> dict[str, Any]:
    """A stored row's extra values with its boxes and its mask as arrays."""
    found: dict[str, Any] = dict(values)
    if schema.has_boxes:
        found = stored_boxes(found)
    if schema.has_mask:
        found[MASK] = decode_stored_mask(found[MASK], stored_HW)
    return found


def _each(rows: GatheredRows, name: str, is_real_N: np.ndarray) -> zip[tuple[Value, bool]]:
    return zip(rows.extra(name), is_real_N.tolist(), strict=True)


@dataclass(frozen=True, slots=True, eq=False)
class RowBoxes:
    """The boxes of one image."""

    sides: Any
    """float32, (R, 4): x0, y0, x1, y1 in pixels of the image."""
    labels: Any
    """int64, (R,): numbers of classes; None if the dataset's boxes have no classes."""

    def __len__(self) -> int:
        return len(self.sides)


@dataclass(frozen=True, slots=True, eq=False)
class BatchBoxes(Sequence[RowBoxes]):
    """The boxes of a batch, `boxes[n]` those of row n; padding has none."""

    sides: Any
    """float32, (K, 4): x0, y0, x1, y1 in pixels of the batch's images."""
    labels: Any
    """int64, (K,): numbers of classes; None if the dataset's boxes have no classes."""
    offsets: Any
    """int64, (N + 1,): row n has the boxes `offsets[n]` to `offsets[n + 1]`, that one excluded."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> RowBoxes: ...
    @overload
    def __getitem__(self, row: slice) -> list[RowBoxes]: ...
    def __getitem__(self, row: int | slice) -> RowBoxes | list[RowBoxes]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of a batch of {len(self)}")
        row %= len(self)
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        return RowBoxes(self.sides[start:stop], None if self.labels is None else self.labels[start:stop])

    def mapped(self, convert: Callable[[Any], Any]) -> BatchBoxes:
        """With each array converted."""
        labels = None if self.labels is None else convert(self.labels)
        return BatchBoxes(convert(self.sides), labels, convert(self.offsets))

    def to(self, *device: Any, **options: Any) -> BatchBoxes:
        """With its tensors on another device; NumPy's arrays as they are."""
        return self.mapped(lambda values: values.to(*device, **options) if hasattr(values, "to") else values)

    def record_stream(self, stream: Any) -> None:
        """Tell its tensors of CUDA that another stream uses them."""
        for values in (self.sides, self.labels, self.offsets):
            if values is not None:
                values.record_stream(stream)


def stored_boxes(values: Mapping[str, Value]) -> dict[str, Any]:
    """A stored row's extra values with its boxes as arrays, under the one name `boxes`."""
    others = {name: value for name, value in values.items() if name not in BOX_COLUMNS}
    labels = numbers_of(values[BOX_LABELS]) if BOX_LABELS in values else None
    return {**others, BOXES: RowBoxes(sides_of(values[BOXES]), labels)}


def sides_of(value: Value) -> np.ndarray:
    """Stored boxes, float32 (R, 4); None for none."""
    return np.array(value or [], np.float32).reshape(-1, NUM_SIDES)


def numbers_of(value: Value) -> np.ndarray:
    """Stored class numbers, int64 (R,)."""
    return np.array(value or [], np.int64)
