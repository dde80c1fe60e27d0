"""What a loader delivers beside the pixels and has to move as they move: the boxes and masks of a batch.

Shape legend: N rows, K boxes of all rows, H height, W width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.augment.annotations import cut_boxes, cut_mask, upside_down
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_stored_mask
from shardmill.loader.boxes import BatchBoxes, numbers_of, sides_of, stored_boxes
from shardmill.typed_columns import ANNOTATIONS, BOX_COLUMNS, BOX_LABELS, BOXES, MASK

if TYPE_CHECKING:
    from shardmill.augment.draws import Draws
    from shardmill.augment.options import AugmentOptions
    from shardmill.augment.windows import Windows
    from shardmill.formats.rows import RowSchema
    from shardmill.loader.live_rows import GatheredRows
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
