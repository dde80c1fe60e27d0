"""Carries the outlines of an image's objects from an annotation file to the task that draws them as its mask."""

from __future__ import annotations

from collections.abc import Iterable

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
