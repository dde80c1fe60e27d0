"""Where the mask of a listed image lies: in a file of its own, or beside the image in its row, record or archive.

A listing carries this place as a text; a task reads the mask behind its image.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, Rejection, SourceImage

if TYPE_CHECKING:
    from etl.sources import SourceReader

# No URI has one.
_BESIDE = "\0"


def in_column(name: str) -> str:
    """A mask in another column of the image's row, or in another feature of its record."""
    return f"{_BESIDE}{name}"


def in_member(name: str, start: int, size_bytes: int) -> str:
    """A mask that is another member of the image's archive."""
    return f"{_BESIDE}{name}{_BESIDE}{start}{_BESIDE}{size_bytes}"


@dataclass(frozen=True, slots=True)
class MaskPlace:
    """The mask of one image."""

    image: SourceImage
    """What the source's reader is given to read it."""
    name: str
    """For a person."""


def mask_place(image: SourceImage, text: str, *, is_in_parts: bool) -> MaskPlace:
    """The place that a listing's text names. `is_in_parts`: whether the image is of one source of several."""
    if text.startswith(_BESIDE):
        name, *numbers = text.removeprefix(_BESIDE).split(_BESIDE)
        container = f"{image.container}{_BESIDE}{name}"
        if not numbers:
            return MaskPlace(replace(image, container=container, size_bytes=UNKNOWN_SIZE), name)
        start, size_bytes = map(int, numbers)
        return MaskPlace(replace(image, container=container, place=start, size_bytes=size_bytes), name)
    # A file of its own, in the part of its image.
    part, separator, _ = image.key.partition("\0")
    container = f"{part}{separator}{text}" if is_in_parts else text
    return MaskPlace(replace(image, container=container, block=NO_BLOCK, size_bytes=UNKNOWN_SIZE), text)


class ReaderOfMasks:
    """Reads images, and the masks beside them by a reader of its own: so both go through a container in its order."""

    num_parallel = 1

    def __init__(self, images: SourceReader, masks: SourceReader) -> None:
        self._images, self._masks = images, masks

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The bytes of an image, or of the mask whose `mask_place` this is."""
        path, of_mask, _ = image.container.partition(_BESIDE)
        return self._masks.read(replace(image, container=path)) if of_mask else self._images.read(image)

    def expect(self, image: SourceImage) -> None:
        """Announce an image."""
        self._images.expect(image)

    def is_there(self, path: str) -> bool:
        """Whether this host sees the container."""
        return self._images.is_there(path)


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
