"""What becomes of a decoded image before it is stored: what a `RowMapping` makes of it in place of its pixels, a batch
at a time, and its boxes and its mask, moved by the geometry that its pixels followed.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from etl.sources.annotations import ANNOTATED_SIZE, SEGMENTATIONS, mask_location
from etl.units.units import UnitTask
from shardmill.images.annotations import (
    CLIPPED_NOTE,
    DROPPED_NOTE,
    OUTSIDE_NOTE,
    MaskTask,
    UprightSize,
    count_outside,
    move_boxes,
    turn_boxes,
)
from shardmill.images.normalize import Geometry, plan_geometry
from shardmill.images.pixels import Refused
from shardmill.options import NormalizeOptions
from shardmill.registry import load_object
from shardmill.row_mapping import RowMapper, RowMapping
from shardmill.typed_columns import BOX_LABELS, BOXES, LABEL, MASK, decode_values, encode_values
from shardmill.values import ANNOTATION_REASONS, ImageSample, Rejection, RejectReason, SourceImage, Value

Outcome = tuple[SourceImage, ImageSample | Rejection]
Read = Callable[[SourceImage], bytes | Rejection]
MakeMasks = Callable[[Iterable[tuple[SourceImage, bytes]]], Iterator[Outcome]]
"""Makes the masks of images, in their order, of the bytes of their `MaskTask`s."""


def map_rows(outcomes: Iterator[Outcome], mapping: RowMapping) -> Iterator[Outcome]:
    """The same images and rejections in the same order: an image has its vector for pixels, and its values beside
    the source's.

    Batches are cut by the order alone, so that another attempt at the unit gives the mapper the same ones.
    """
    mapper = _opened(os.getpid(), mapping.opener, mapping.options, mapping.encoding)
    waiting: list[Outcome] = []
    num_samples = 0
    for image, outcome in outcomes:
        waiting.append((image, outcome))
        num_samples += isinstance(outcome, ImageSample)
        if num_samples == mapper.batch_size:
            yield from _mapped(waiting, mapper)
            waiting, num_samples = [], 0
    yield from _mapped(waiting, mapper)


def _mapped(outcomes: list[Outcome], mapper: RowMapper) -> Iterator[Outcome]:
    samples = [outcome for _, outcome in outcomes if isinstance(outcome, ImageSample)]
    rows = iter(mapper.map(samples) if samples else ())
    for image, outcome in outcomes:
        if isinstance(outcome, Rejection):
            yield image, outcome
            continue
        row = next(rows)
        values = encode_values({**decode_values(image.extra), **row.values})
        yield replace(image, extra=values), replace(outcome, image=row.vector)


@cache
def _opened(process_id: int, opener: str, options: str, encoding: str) -> RowMapper:
    """Opened once in each process: a fork must not use its parent's framework, so the process is part of the key.

    Raises what the opener raises: IntegrityError for an altered model.
    """
    open_mapper: Callable[[str, str], RowMapper] = load_object(opener)
    return open_mapper(options, encoding)


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
    mask_task: MaskTask | None = None
    """What its mask has to be made of."""

    @property
    def key(self) -> str:
        return self.image.key

    @property
    def is_known(self) -> bool:
        """Whether the latest version has this mask of an image with these bytes."""
        known = self.image.known_sha256, self.image.known_mask_sha256
        return bool(self.mask) and known == (self.sample.source_sha256, hashlib.sha256(self.mask).hexdigest())

    def with_mask(self, mask: ImageSample | Rejection) -> Annotated | Rejection:
        """With what `make_mask` has made, or broke a limit at."""
        image = self.image
        if isinstance(mask, Rejection):
            # Like any bad mask, one that no decoder survives is read again by the next run.
            is_of_mask = mask.reason in ANNOTATION_REASONS
            reason = mask.reason if is_of_mask else RejectReason.BAD_MASK
            detail = mask.detail if is_of_mask else f"its mask {mask.detail}"
            return image.rejected(reason, detail, "decode", self.sample.source_sha256)
        values = {**decode_values(image.extra), MASK: hashlib.sha256(mask.image).hexdigest()}
        return replace(self, image=replace(image, extra=encode_values(values)), mask=mask.image, mask_task=None)


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
        if SEGMENTATIONS in values:
            return data
        location = mask_location(image, str(values[MASK]), is_in_parts=self._is_in_parts)
        mask = self._read(location.image)
        if isinstance(mask, Rejection):
            return image.rejected(RejectReason.BAD_MASK, f"{location.name}: {mask.detail}")
        self._masks[image.key] = mask
        return data

    def has_file(self, image: SourceImage) -> bool:
        """Whether an image that was read has a mask that was read with it, and not taken yet."""
        return image.key in self._masks

    def take(self, key: str) -> bytes:
        """The mask of an image that was read."""
        return self._masks.pop(key, b"")


def with_annotations(
    outcomes: Iterable[Outcome], masks: MaskReader, task: UnitTask, make_masks: MakeMasks
) -> Iterator[Annotated | Rejection]:
    """The outcomes in their order; what a dataset has of boxes and masks is moved with the pixels."""
    has_annotations, options = task.row_schema.has_annotations, task.decode_options
    moved = (_moved(image, outcome, options, has_annotations=has_annotations) for image, outcome in outcomes)
    if not task.row_schema.has_mask:
        yield from moved
        return
    waiting: deque[Annotated | Rejection] = deque()

    def with_masks() -> Iterator[tuple[SourceImage, bytes]]:
        for found in moved:
            waiting.append(found)
            file = masks.take(found.key)
            if isinstance(found, Annotated) and found.mask_task is not None:
                yield found.image, found.mask_task.with_file(file)

    for image, mask in make_masks(with_masks()):
        # Before it may be those that need no mask.
        while (found := waiting.popleft()).key != image.key:
            yield found
        assert isinstance(found, Annotated)
        yield found.with_mask(mask)
    yield from waiting


def _moved(
    image: SourceImage, outcome: ImageSample | Rejection, options: NormalizeOptions, *, has_annotations: bool
) -> Annotated | Rejection:
    if isinstance(outcome, Rejection):
        return outcome
    return move_annotations(image, outcome, options) if has_annotations else Annotated(image, outcome)


def move_annotations(image: SourceImage, sample: ImageSample, options: NormalizeOptions) -> Annotated | Rejection:
    """The image with its boxes in the stored pixels, and its labels with the classes of the boxes left; its mask is
    still to be made.

    A rejection if boxes are of an image of another size.
    """
    values, geometry = decode_values(image.extra), plan_geometry(sample.source_height, sample.source_width, options)
    segmentations, size = values.pop(SEGMENTATIONS, None), values.pop(ANNOTATED_SIZE, None)
    upright = UprightSize(sample.source_height, sample.source_width, sample.orientation)
    shape_HW = (int(size[1]), int(size[0])) if isinstance(size, list) else None
    try:
        notes = _move_boxes(values, shape_HW, upright, geometry) if BOXES in values else []
    except Refused as refusal:
        return image.rejected(refusal.reason, refusal.detail, "decode", sample.source_sha256)
    mask_task = None
    if segmentations is not None:
        mask_task = MaskTask(upright, str(segmentations), shape_HW)
    elif MASK in values:
        mask_task = MaskTask(upright)
    sample = replace(sample, notes=(*sample.notes, *notes))
    return Annotated(replace(image, extra=encode_values(values)), sample, image.extra, mask_task=mask_task)


def _move_boxes(
    values: dict[str, Value], shape_HW: tuple[int, int] | None, upright: UprightSize, geometry: Geometry
) -> list[str]:
    """Put the moved boxes in place of the listed ones. -> notes."""
    sides: list[float] = values[BOXES]  # pyright: ignore[reportAssignmentType]
    if shape_HW is not None and upright.is_of_file(*shape_HW, "its boxes are of", sides):
        sides = list(turn_boxes(sides, upright.orientation, upright.height, upright.width))
    moved, num_outside = move_boxes(sides, geometry), count_outside(sides, upright.height, upright.width)
    values[BOXES] = list(moved.sides)
    names = values.get(BOX_LABELS)
    if isinstance(names, list):
        kept: list = [names[number] for number in moved.kept]
        values |= {BOX_LABELS: kept, LABEL: sorted(set(kept))}
    notes = [CLIPPED_NOTE] if moved.num_clipped else []
    counts = {OUTSIDE_NOTE: num_outside, DROPPED_NOTE: moved.num_dropped}
    return notes + [f"{note}{count}" for note, count in counts.items() if count]
