"""Carries the outlines of an image's objects from an annotation file to the task that draws them as its mask."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

OUTLINES = "outlines"
"""Beside the boxes of a listed image: the text of its outlines, of which its mask is drawn."""
MAX_VALUE = 255
"""Largest number of a mask; 0 is where there is no object."""


def outline_text(value: int, segmentation: str, bbox: Any, *, is_crowd: bool) -> str:
    """One outline, its segmentation as JSON, beside its box, which it must not leave."""
    return f"[{value},{int(is_crowd)},{json.dumps(bbox)},{segmentation}]"


def joined(outlines: Iterable[str]) -> str:
    """The outlines of one image, in the order of the file."""
    return f"[{','.join(outlines)}]"
