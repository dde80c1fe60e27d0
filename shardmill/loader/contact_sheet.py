"""A picture of some samples of a split, to see what a dataset holds."""

from __future__ import annotations

import math
import unicodedata
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from shardmill.loader.boxes import RowBoxes
from shardmill.loader.drawn import Named, drawn_over, named_boxes
from shardmill.typed_columns import BOXES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardmill.loader.samples import StoredSample


# Where an operating system keeps its fonts, Pillow finds them by these names.
_SYSTEM_FONTS = ("DejaVuSans.ttf", "NotoSans-Regular.ttf", "Arial.ttf", "arial.ttf")
_SIZE_PIXELS = 11
_NO_CHARACTER = "\uffff"

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@cache
def caption_font() -> Font:
    """One of the system, or Pillow's bitmaps of Latin-1: its default font has not even these letters."""
    for name in _SYSTEM_FONTS:
        with suppress(OSError, ImportError):
            return ImageFont.truetype(name, _SIZE_PIXELS)
    return ImageFont.load_default_imagefont()


def writable(text: str, font: Font) -> str:
    """The text with a question mark for each character that the font lacks."""
    # Some file systems take letters apart from their accents.
    text = unicodedata.normalize("NFC", text)
    if isinstance(font, ImageFont.ImageFont):
        return text.encode("latin-1", "replace").decode("latin-1")
    absent = _drawn(_NO_CHARACTER, font)
    return "".join(each if each.isspace() or _drawn(each, font) != absent else "?" for each in text)


def _drawn(character: str, font: ImageFont.FreeTypeFont) -> bytes:
    picture = Image.new("L", (4 * _SIZE_PIXELS, 2 * _SIZE_PIXELS))
    ImageDraw.Draw(picture).text((_SIZE_PIXELS, 0), character, fill=255, font=font)
    return picture.tobytes()


_MIN_SIDE, _MAX_SIDE, _GAP, _LINE = 64, 192, 4, 14


def contact_sheet(samples: Sequence[StoredSample], class_names: Sequence[str]) -> Image.Image:
    """The images in a grid, about as wide as high, with boxes and masks; below each the names of its classes."""
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
        shown = drawn_over(picture.convert("RGB").resize(size, how), sample.extra, scale)
        boxes, captions = sample.extra.get(BOXES), []
        if isinstance(boxes, RowBoxes):
            captions = named_boxes(boxes, class_names)
        if not captions and class_names and sample.label is not None:
            captions = [Named(class_names[sample.label], 1, "black")]
        sheet.paste(shown, (left, top))
        _write(draw, captions, (left, top + side), side)
    return sheet


def _write(draw: ImageDraw.ImageDraw, captions: Sequence[Named], place: tuple[int, int], width: int) -> None:
    left, top = place
    for each in captions:
        text = _fitting(draw, writable(str(each), caption_font()), place[0] + width - left)
        draw.text((left, top), text, fill=each.colour, font=caption_font())
        left += round(draw.textlength(f"{text} ", caption_font()))
        if left + _GAP >= place[0] + width:
            return


def _fitting(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    while len(text) > 1 and draw.textlength(text, caption_font()) > width:
        text = text[:-1]
    return text
