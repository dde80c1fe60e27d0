"""Draws boxes and masks over pictures of stored images, for contact sheets and reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw

from shardmill.loader.boxes import RowBoxes
from shardmill.typed_columns import BOXES, MASK

# Okabe and Ito's colours, which most people tell apart, without black.
_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")
_PIXELS_PER_WIDTH = 96
"""A line is one pixel wide for each so many pixels of the picture."""


@dataclass(frozen=True, slots=True)
class Named:
    """The boxes of one class in one image."""

    name: str
    count: int
    colour: str

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count} {self.name}"


def named_boxes(boxes: RowBoxes, class_names: Sequence[str]) -> list[Named]:
    """The classes of an image's boxes in ascending order; empty if boxes have no classes."""
    counts: Counter[int] = Counter([] if boxes.labels is None else boxes.labels.tolist())
    return [Named(class_names[label], count, _colour_of(label)) for label, count in sorted(counts.items())]


def is_drawn(values: Mapping[str, Any]) -> bool:
    """Whether a sample's extra values have something to draw."""
    return isinstance(values.get(BOXES), RowBoxes) or isinstance(values.get(MASK), np.ndarray)


def drawn_over(picture: Image.Image, values: Mapping[str, Any], scale: float) -> Image.Image:
    """A picture that is `scale` times as large as the stored image, with its boxes and its mask."""
    mask_HW, boxes = values.get(MASK), values.get(BOXES)
    if isinstance(mask_HW, np.ndarray):
        picture = _tinted(picture, mask_HW)
    if isinstance(boxes, RowBoxes):
        _outline(picture, boxes, scale)
    return picture


def picture_of(image_HWC: np.ndarray, values: Mapping[str, Any], longest_side: int) -> Image.Image:
    """A stored image as a picture of this size, with its boxes and mask. Pixels of a small one stay squares."""
    picture = Image.fromarray(image_HWC.squeeze()).convert("RGB")
    scale = longest_side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    picture = picture.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX)
    return drawn_over(picture, values, scale)


def _tinted(picture: Image.Image, mask_HW: np.ndarray) -> Image.Image:
    """Half of the colour of each value, but for 0."""
    colours = np.zeros((256, 3), np.uint8)
    for value in range(1, 256):
        colours[value] = ImageColor.getrgb(_colour_of(value))
    tints = Image.fromarray(colours[mask_HW]).resize(picture.size, Image.Resampling.NEAREST)
    shares = Image.fromarray(np.where(mask_HW > 0, 127, 0).astype(np.uint8)).resize(
        picture.size, Image.Resampling.NEAREST
    )
    return Image.composite(tints, picture, shares)


def _outline(picture: Image.Image, boxes: RowBoxes, scale: float) -> None:
    """A class has one colour."""
    draw = ImageDraw.Draw(picture)
    line_width = max(1, round(max(picture.size) / _PIXELS_PER_WIDTH))
    for (x0, y0, x1, y1), colour in _outlines(boxes):
        # The last pixel of a box is inside of it.
        right, bottom = max(x0 * scale, x1 * scale - 1), max(y0 * scale, y1 * scale - 1)
        corners = (round(x0 * scale), round(y0 * scale), round(right), round(bottom))
        draw.rectangle(corners, outline=colour, width=line_width)


def _outlines(boxes: RowBoxes) -> Iterator[tuple[list[float], str]]:
    labels = [0] * len(boxes) if boxes.labels is None else boxes.labels.tolist()
    for sides, label in zip(boxes.sides.tolist(), labels, strict=True):
        yield sides, _colour_of(label)


def _colour_of(label: int) -> str:
    return _COLOURS[label % len(_COLOURS)]
