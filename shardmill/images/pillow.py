"""Pillow's decompressors for GIF and TIFF, behind one plain gray picture: it gets a file that we wrote, not the source.

Our walkers have checked sizes and layout before, and colour, alpha and pages are worked out afterwards. So no other
plugin of Pillow is reached, none of its conversions (16 bits to RGB saturates), and not its limit on pixels, a global
that knows nothing of our options.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from shardmill.images.pixels import Refused
from shardmill.values import RejectReason

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile


def decode_plain_gray(plugin: Callable[[io.BytesIO], ImageFile], plain_file: bytes) -> np.ndarray:
    """The 8-bit samples, H x W; refuses compressed data that is damaged or ends too early."""
    try:
        with plugin(io.BytesIO(plain_file)) as picture:
            picture.load()
            if picture.mode != "L":
                raise AssertionError(f"a plain gray file was read as {picture.mode}")
            return np.asarray(picture)
    except OSError as error:
        if "out of memory" in str(error) or str(error) == "decoder error -9":
            raise MemoryError(str(error)) from error
        raise Refused(RejectReason.CORRUPT_SCAN, f"Pillow: {error}") from error
