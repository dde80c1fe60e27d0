"""Pictures of a dataset's samples with their boxes and masks: contact sheets, drawings for reports, and how a version
shows itself in a notebook.
"""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from shardmill.errors import ShardmillError
from shardmill.html import picture, table, text
from shardmill.loader.annotations import RowBoxes
from shardmill.typed_columns import BOXES, MASK
from shardmill.words import first_of, rejected

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
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
    for place, (image, sample) in enumerate(zip(pictures, samples, strict=True)):
        left, top = (place % columns) * cell[0] + _GAP, (place // columns) * cell[1] + _GAP
        scale = side / max(image.size)
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        # Pixels of small images stay visible as squares.
        how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BOX
        shown = drawn_over(image.convert("RGB").resize(size, how), sample.extra, scale)
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
        # Half of the colour of each value, but for 0.
        colours = np.array([(0, 0, 0), *(ImageColor.getrgb(_colour_of(value)) for value in range(1, 256))], np.uint8)
        tints = Image.fromarray(colours[mask_HW]).resize(picture.size, Image.Resampling.NEAREST)
        shares = Image.fromarray(np.where(mask_HW > 0, 127, 0).astype(np.uint8))
        picture = Image.composite(tints, picture, shares.resize(picture.size, Image.Resampling.NEAREST))
    if isinstance(boxes, RowBoxes):
        draw = ImageDraw.Draw(picture)
        line_width = max(1, round(max(picture.size) / _PIXELS_PER_WIDTH))
        labels = [0] * len(boxes) if boxes.labels is None else boxes.labels.tolist()
        for (x0, y0, x1, y1), label in zip(boxes.sides.tolist(), labels, strict=True):
            # The last pixel of a box is inside of it.
            right, bottom = max(x0 * scale, x1 * scale - 1), max(y0 * scale, y1 * scale - 1)
            corners = (round(x0 * scale), round(y0 * scale), round(right), round(bottom))
            draw.rectangle(corners, outline=_colour_of(label), width=line_width)
    return picture


def picture_of(image_HWC: np.ndarray, values: Mapping[str, Any], longest_side: int) -> Image.Image:
    """A stored image as a picture of this size, with its boxes and mask. Pixels of a small one stay squares."""
    picture = Image.fromarray(image_HWC.squeeze()).convert("RGB")
    scale = longest_side / max(picture.size)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    picture = picture.resize(size, Image.Resampling.NEAREST if scale >= 1 else Image.Resampling.BOX)
    return drawn_over(picture, values, scale)


def _colour_of(label: int) -> str:
    return _COLOURS[label % len(_COLOURS)]


_THUMBNAILS, _NAMES = 12, 10


def dataset_html(dataset: Dataset, show: Callable[[int], Image.Image]) -> str:
    """A table, one row for each split below it, and what `show` draws, for which some shards are read."""
    manifest = dataset.manifest
    splits = table(
        ((name, f"{split.num_rows:,}", f"{split.num_shards:,}", f"{split.image_bytes / 1e6:,.1f} MB")
         for name, split in manifest.splits.items()),
        head=("split", "rows", "shards", "images"),
    )  # fmt: skip
    name = f"<b>{text(dataset.pin.uri)}@{manifest.version}</b>"
    return f"<div>{name}{table(_facts(dataset))}{splits}{thumbnails(dataset, show)}</div>"


def thumbnails(dataset: Dataset, show: Callable[[int], Image.Image], num_samples: int = _THUMBNAILS) -> str:
    """Images from all over a split, or why there are none: to show a value must not fail."""
    if dataset.manifest.predicted_by is not None:
        return ""
    try:
        return picture(show(num_samples), f"{num_samples} images of the dataset")
    except (ShardmillError, OSError) as error:
        return f"<p>no images are shown: {text(error)}</p>"


def _facts(dataset: Dataset) -> Iterator[tuple[str, str]]:
    manifest, schema = dataset.manifest, dataset.manifest.row_schema
    counts = manifest.counts
    yield "version", f"{manifest.version} ({manifest.operation}), {manifest.created_at}"
    if manifest.predicted_by is None:
        shape = schema.one_shape_HWC
        size = "x".join(map(str, shape)) if shape is not None else "several sizes"
        yield "images", f"{size} {manifest.normalize.encoding} in {', '.join(manifest.formats)}"
    else:
        yield "model", str(manifest.predicted_by)
    if manifest.class_names:
        yield "classes", f"{len(manifest.class_names):,}: {first_of(manifest.class_names, _NAMES)}"
    if schema.extra:
        yield "columns", first_of([column.name for column in schema.extra], _NAMES)
    num_rejected = rejected(counts.rejected, counts.by_reason)
    yield "inputs", f"{counts.listed:,} listed, {counts.accepted:,} accepted, {num_rejected}"
    yield "content digest", manifest.content_digest[:12]
