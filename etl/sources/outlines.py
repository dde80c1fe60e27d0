"""Carries the outlines of an image's objects from an annotation file to the task that draws them as its mask."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from shardmill.images.outlines import Outline, polygon_of, run_lengths_of
from shardmill.images.pixels import Refused
from shardmill.printable import printable
from shardmill.values import RejectReason

OUTLINES = "outlines"
"""Beside the boxes of a listed image: the text of its outlines, of which its mask is drawn."""
MAX_VALUE = 255
"""Largest number of a mask; 0 is where there is no object."""


def outline_text(value: int, segmentation: str, *, is_crowd: bool) -> str:
    """One outline, its segmentation as JSON."""
    return f"[{value},{int(is_crowd)},{segmentation}]"


def joined(outlines: Iterable[str]) -> str:
    """The outlines of one image, in the order of the file."""
    return f"[{','.join(outlines)}]"


def outlines_of(text: str, height: int, width: int) -> list[Outline]:
    """What `joined` has made. Raises Refused for an outline that is neither polygons nor run lengths of this size."""
    return [
        Outline(value, bool(is_crowd), **_region(segmentation, height, width))
        for value, is_crowd, segmentation in json.loads(text)
    ]


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
