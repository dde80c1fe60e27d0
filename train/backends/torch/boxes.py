"""Names the elements of a model that a rank holds: boxes of arrays, with the names of the model that was built.

A strategy may take a module apart (train/models/split_attention.py). Files, hashes and other layouts never see that: a
weight of such a part is rows of an array of the model as `train.model` builds it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor that this rank holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the tensor, along each of its axes."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.shape, strict=True))


def whole_box(shape: tuple[int, ...]) -> Box:
    """All elements of a tensor."""
    return Box(shape, (0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class NamedBox:
    """A box of the array `name`."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Rows:
    """Part `index` of `count` equal parts of the rows of the array `name`."""

    name: str
    index: int = 0
    count: int = 1

    def of(self, box: Box) -> NamedBox:
        """`box` of these rows, as one of the array."""
        if self.count == 1:
            return NamedBox(self.name, box)
        num_rows, *others = box.global_shape
        offsets = (self.index * num_rows + box.offsets[0], *box.offsets[1:])
        return NamedBox(self.name, Box((self.count * num_rows, *others), offsets, box.shape))


def rows_by_name(model: Any) -> dict[str, Rows]:
    """Name of each parameter of a module -> what it is of the model that was built.

    A part that took the place of another one says so by `rows_of`: name of its parameter -> (the other's, index).
    """
    found = {name: Rows(name) for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        rows_of: dict[str, tuple[str, int]] = getattr(module, "rows_of", {})
        counts = Counter(name for name, _ in rows_of.values())
        prefix = f"{path}." if path else ""
        for name, (there, index) in rows_of.items():
            found[prefix + name] = Rows(prefix + there, index, counts[there])
    return found
