"""A picture of some samples of a split, to see what a dataset holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardmill.loader.samples import StoredSample

_MIN_SIDE, _MAX_SIDE, _GAP, _LINE = 64, 192, 4, 14


def contact_sheet(samples: Sequence[StoredSample], class_names: Sequence[str]) -> Image.Image:
    """The images in a grid, about as wide as high, each above the name of its class."""
    pictures = [Image.fromarray(each.image_HWC.squeeze()) for each in samples]
    side = min(_MAX_SIDE, max(_MIN_SIDE, *(max(picture.size) for picture in pictures)))
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    cell = side + _GAP, side + _GAP + (_LINE if class_names else 0)
    sheet = Image.new("RGB", (columns * cell[0] + _GAP, rows * cell[1] + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for place, (picture, sample) in enumerate(zip(pictures, samples, strict=True)):
        left, top = (place % columns) * cell[0] + _GAP, (place // columns) * cell[1] + _GAP
        scale = side / max(picture.size)
        size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
        # Pixels of small images stay visible as squares.
        how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BOX
        sheet.paste(picture.convert("RGB").resize(size, how), (left, top))
        if class_names and sample.label is not None:
            # The font that Pillow brings has no letters beyond Latin ones.
            name = class_names[sample.label].encode("latin-1", "replace").decode("latin-1")
            draw.text((left, top + side), _fitting(draw, name, side), fill="black")
    return sheet


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    while len(text) > 1 and draw.textlength(text) > width:
        text = text[:-1]
    return text
