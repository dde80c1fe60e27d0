"""Moves the boxes and the mask of an image that was decoded, by the geometry that its pixels followed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from etl.sources.boxes import ANNOTATED_SIZE
from etl.sources.mask_places import mask_place
from etl.sources.outlines import OUTLINES, outlines_of
from etl.units.units import UnitTask
from shardmill.formats.encodings import encode_mask
from shardmill.images.boxes import CLIPPED_NOTE, DROPPED_NOTE, move_boxes, turn_boxes
from shardmill.images.geometry import Geometry, plan_geometry
from shardmill.images.masks import decode_mask, move_mask, size_of_mask
from shardmill.images.outlines import draw_outlines
from shardmill.images.pixels import SWAPS_SIDES, Refused, apply_orientation
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import BOX_LABELS, BOXES, LABEL, MASK, decode_values, encode_values
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage, Value

Read = Callable[[SourceImage], bytes | Rejection]


@dataclass(frozen=True, slots=True)
class Annotated:
    """An image with what moved with its pixels."""

    image: SourceImage
    """Its values are those that a row stores."""
    sample: ImageSample
    listed_extra: str = ""
    """The text of its values as the source lists them; empty if nothing moved."""
    mask: bytes = b""
    """As it is stored; empty if the dataset has no masks."""

    @property
    def is_known(self) -> bool:
        """Whether the latest version has this mask of an image with these bytes."""
        known = self.image.known_sha256, self.image.known_mask_sha256
        return bool(self.mask) and known == (self.sample.source_sha256, hashlib.sha256(self.mask).hexdigest())


class MaskReader:
    """Reads the mask of each image behind it, if there are masks, and keeps it until it is taken. Safe for threads."""

    def __init__(self, read: Read, task: UnitTask) -> None:
        self._read = read
        self._has_masks, self._is_in_parts = task.row_schema.has_mask, bool(task.source.parts)
        self._masks: dict[str, bytes] = {}

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The image's bytes; a rejection if its mask cannot be read."""
        data = self._read(image)
        if isinstance(data, Rejection) or not self._has_masks:
            return data
        values = decode_values(image.extra)
        if OUTLINES in values:
            return data
        place = mask_place(image, str(values[MASK]), is_in_parts=self._is_in_parts)
        mask = self._read(place.image)
        if isinstance(mask, Rejection):
            return image.rejected(RejectReason.BAD_MASK, f"{place.name}: {mask.detail}")
        self._masks[image.key] = mask
        return data

    def has_file(self, image: SourceImage) -> bool:
        """Whether an image that was read has a mask that was read with it, and not taken yet."""
        return image.key in self._masks

    def take(self, image: SourceImage) -> bytes:
        """The mask of an image that was read."""
        return self._masks.pop(image.key, b"")


def with_annotations(
    outcomes: Iterable[tuple[SourceImage, ImageSample | Rejection]], masks: MaskReader, task: UnitTask
) -> Iterator[Annotated | Rejection]:
    """The outcomes in their order; what a dataset has of boxes and masks is moved with the pixels."""
    for image, outcome in outcomes:
        mask = masks.take(image)
        if isinstance(outcome, Rejection):
            yield outcome
        elif task.row_schema.has_annotations:
            yield move_annotations(image, outcome, mask, task.decode_options)
        else:
            yield Annotated(image, outcome)


def move_annotations(
    image: SourceImage, sample: ImageSample, mask: bytes, options: NormalizeOptions
) -> Annotated | Rejection:
    """The image with its boxes and its mask in the stored pixels, and its labels with the classes of the boxes left.

    A rejection if they are of an image of another size, or the mask is none.
    """
    values, geometry = decode_values(image.extra), plan_geometry(sample.source_height, sample.source_width, options)
    outlines, size = values.pop(OUTLINES, None), values.pop(ANNOTATED_SIZE, None)
    has_mask = MASK in values or outlines is not None
    try:
        notes = _move_boxes(values, size, sample, geometry) if BOXES in values else []
        if outlines is not None:
            stored = _draw_mask(str(outlines), size, sample, geometry)
        else:
            stored = _move_mask(mask, sample, geometry) if has_mask else b""
    except Refused as refusal:
        return image.rejected(refusal.reason, refusal.detail, "decode", sample.source_sha256)
    if has_mask:
        values[MASK] = hashlib.sha256(stored).hexdigest()
    sample = replace(sample, notes=(*sample.notes, *notes))
    return Annotated(replace(image, extra=encode_values(values)), sample, image.extra, stored)


def _move_boxes(values: dict[str, Value], size: Value, sample: ImageSample, geometry: Geometry) -> list[str]:
    """Put the moved boxes in place of the listed ones. -> notes."""
    sides: list[float] = values[BOXES]  # pyright: ignore[reportAssignmentType]
    if isinstance(size, list) and _is_of_file(int(size[1]), int(size[0]), sample, "its boxes are of"):
        sides = list(turn_boxes(sides, sample.orientation, sample.source_height, sample.source_width))
    moved = move_boxes(sides, geometry)
    values[BOXES] = list(moved.sides)
    names = values.get(BOX_LABELS)
    if isinstance(names, list):
        kept: list = [names[number] for number in moved.kept]
        values |= {BOX_LABELS: kept, LABEL: sorted(set(kept))}
    notes = [CLIPPED_NOTE] if moved.num_clipped else []
    return notes + ([f"{DROPPED_NOTE}{moved.num_dropped}"] if moved.num_dropped else [])


def _move_mask(mask: bytes, sample: ImageSample, geometry: Geometry) -> bytes:
    size = size_of_mask(mask)
    is_of_file = size is not None and _is_of_file(*size, sample, "its mask has")
    return _stored_mask(decode_mask(mask), sample, geometry, is_of_file=is_of_file)


def _draw_mask(outlines: str, size: Value, sample: ImageSample, geometry: Geometry) -> bytes:
    """Of outlines in an image of this width and height; of the upright one if the source does not say."""
    height, width = sample.source_height, sample.source_width
    if isinstance(size, list):
        height, width = int(size[1]), int(size[0])
    is_of_file = _is_of_file(height, width, sample, "its outlines are of")
    mask_HW = draw_outlines(outlines_of(outlines, height, width), height, width)
    return _stored_mask(mask_HW, sample, geometry, is_of_file=is_of_file)


def _stored_mask(mask_HW: np.ndarray, sample: ImageSample, geometry: Geometry, *, is_of_file: bool) -> bytes:
    if is_of_file:
        mask_HW = apply_orientation(mask_HW[:, :, None], sample.orientation)[:, :, 0]
    return encode_mask(move_mask(mask_HW, geometry))


def _is_of_file(height: int, width: int, sample: ImageSample, what: str) -> bool:
    """Whether this is the size of the file's own pixels, with the sides exchanged, and not that of the upright image.

    Raises Refused if it is neither.
    """
    upright = sample.source_height, sample.source_width
    if (height, width) == upright:
        return False
    if sample.orientation in SWAPS_SIDES and (width, height) == upright:
        return True
    detail = f"{what} {width}x{height} pixels; the image has {upright[1]}x{upright[0]}"
    raise Refused(RejectReason.ANNOTATED_SIZE, detail)
