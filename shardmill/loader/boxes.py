"""The boxes of a batch: all of them in one array, and where those of each row begin.

Shape legend: N rows, K boxes of all rows, R boxes of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from shardmill.typed_columns import BOX_COLUMNS, BOX_LABELS, BOXES, NUM_SIDES

if TYPE_CHECKING:
    from shardmill.values import Value


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
