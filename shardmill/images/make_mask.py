"""Makes the mask that a row stores, of a mask's file or of outlines: what a decoder calls for masks, as `process_image`
for images.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shardmill.formats.encodings import encode_mask
from shardmill.images.boxes import count_outside
from shardmill.images.geometry import plan_geometry
from shardmill.images.masks import decode_mask, move_mask, size_of_mask
from shardmill.images.outlines import Outline, draw_outlines, polygon_of, run_lengths_of
from shardmill.images.pixels import SWAPS_SIDES, Refused, apply_orientation, refusal_of
from shardmill.options import NormalizeOptions
from shardmill.printable import printable
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage

MAKE_MASK = "shardmill.images.make_mask:make_mask"


@dataclass(frozen=True, slots=True)
class UprightSize:
    """The size of a source that was turned upright by EXIF's orientation."""

    height: int
    width: int
    orientation: int

    def is_of_file(self, height: int, width: int, what: str, sides: Sequence[float] = ()) -> bool:
        """Whether this is the size of the file's own pixels, with the sides exchanged, and not that of the upright
        image.

        Raises Refused if it is neither, or if boxes of these `sides` can only have been drawn in the upright image.
        """
        if (height, width) == (self.height, self.width):
            return False
        detail = f"{what} {width}x{height} pixels; the image has {self.width}x{self.height}"
        if self.orientation in SWAPS_SIDES and (width, height) == (self.height, self.width):
            if count_outside(sides, height, width) == 0 or count_outside(sides, self.height, self.width):
                return True
            detail = f"{what} {width}x{height} pixels, as its source says, and end outside of them; upright {detail}"
        raise Refused(RejectReason.ANNOTATED_SIZE, detail)


@dataclass(frozen=True, slots=True)
class MaskTask:
    """What a mask is made of, besides its file."""

    source: UprightSize
    outlines: str | None = None
    """JSON: a value, whether it is of a crowd, a box and a segmentation of COCO's, of each outline; None for a file."""
    outlines_shape_HW: tuple[int, int] | None = None
    """Of the image in which they were drawn; of the upright one if the source does not say."""

    def with_file(self, mask: bytes) -> bytes:
        """The bytes from which `make_mask` makes it."""
        return json.dumps(asdict(self)).encode() + b"\n" + mask


def make_mask(source: SourceImage, data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
    """The stored mask as the `image` of a sample; a rejection if it is none, or of an image of another size."""
    line, _, file = data.partition(b"\n")
    facts: dict[str, Any] = json.loads(line)
    task = MaskTask(**{**facts, "source": UprightSize(**facts["source"])})
    try:
        mask_HW = _of_file(file, task) if task.outlines is None else _of_outlines(task.outlines, task)
        stored_HW = move_mask(mask_HW, plan_geometry(task.source.height, task.source.width, options))
        stored = encode_mask(stored_HW)
    except Exception as error:
        refused = refusal_of(error, RejectReason.BAD_MASK)
        return source.rejected(refused.reason, refused.detail)
    height, width = stored_HW.shape
    return ImageSample(stored, height, width, 1, source_sha256="", channel_sums=(), channel_square_sums=())


def _of_file(file: bytes, task: MaskTask) -> np.ndarray:
    size = size_of_mask(file)
    is_of_file = size is not None and task.source.is_of_file(*size, "its mask has")
    return _upright(decode_mask(file), task, is_of_file=is_of_file)


def _of_outlines(text: str, task: MaskTask) -> np.ndarray:
    height, width = task.outlines_shape_HW or (task.source.height, task.source.width)
    outlines = [
        Outline(value, bool(is_crowd), box=_box_of(bbox), **_region(segmentation, height, width))
        for value, is_crowd, bbox, segmentation in json.loads(text)
    ]
    sides = [side for outline in outlines for side in outline.box or ()]
    is_of_file = task.source.is_of_file(height, width, "its outlines are of", sides)
    return _upright(draw_outlines(outlines, height, width), task, is_of_file=is_of_file)


def _box_of(bbox: Any) -> tuple[float, float, float, float] | None:
    """COCO's corner, width and height as two corners; None for what is no box."""
    try:
        x, y, width, height = map(float, bbox)
    except (ValueError, TypeError, OverflowError):
        return None
    return x, y, x + width, y + height


def _region(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    if isinstance(segmentation, list):
        return {"polygons_P2": tuple(map(polygon_of, segmentation))}
    if not isinstance(segmentation, dict) or "counts" not in segmentation:
        raise Refused(RejectReason.BAD_MASK, f"the outline {printable(repr(segmentation)[:60])} is no polygon")
    size = segmentation.get("size")
    if size != [height, width]:
        raise Refused(
            RejectReason.ANNOTATED_SIZE,
            f"the size (height, width) of its run lengths is {size}; its annotations have {[height, width]}",
        )
    return {"run_lengths": run_lengths_of(segmentation["counts"])}


def _upright(mask_HW: np.ndarray, task: MaskTask, *, is_of_file: bool) -> np.ndarray:
    return apply_orientation(mask_HW[:, :, None], task.source.orientation)[:, :, 0] if is_of_file else mask_HW
