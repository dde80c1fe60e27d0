"""Decodes with Pillow: one plugin at a time, on bytes of a known format, with its errors as rejections.

So no other plugin is reached. Its limit on pixels is a global that knows nothing of our options; callers check sizes.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL.Image import DecompressionBombError

from shardmill.images.icc import to_srgb
from shardmill.images.pixels import Refused, check_dimensions, expect_size, flatten_over_white
from shardmill.values import RejectReason

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

    from shardmill.options import NormalizeOptions

# Words of Pillow's messages.
_REASONS = {
    "runcated": RejectReason.TRUNCATED,
    "not enough image data": RejectReason.TRUNCATED,
    "Unsupported BMP": RejectReason.UNSUPPORTED_MODE,
    "decompression bomb": RejectReason.TOO_MANY_PIXELS,
}
# What plugins raise for bytes that they do not expect; `SyntaxError` is Pillow's own word for another format, and
# `RuntimeError` what libavif's raises.
_UNEXPECTED = (SyntaxError, EOFError, ValueError, TypeError, RuntimeError, DecompressionBombError, OSError)
_AT_THE_END = (IndexError, struct.error)


@dataclass(frozen=True, slots=True, eq=False)
class FirstFrame:
    """What a plugin has decoded."""

    pixels_HWC: np.ndarray
    """H x W x 3 in sRGB, on white if it has transparency."""
    notes: list[str]
    picture: ImageFile
    """Closed: what the plugin says of the file."""


def decode_first_frame(plugin: Callable[[io.BytesIO], ImageFile], data: bytes, options: NormalizeOptions) -> FirstFrame:
    """The first frame of a file, in the size that its header declares and that is within the limits."""
    with opened(plugin, data) as picture:
        width, height = picture.size
        check_dimensions(height, width, options)
        pixels_HWC = loaded(picture)
        num_frames = getattr(picture, "n_frames", 1)
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    return FirstFrame(to_srgb_over_white(pixels_HWC, picture.info.get("icc_profile"), notes), notes, picture)


@contextmanager
def opened(plugin: Callable[[io.BytesIO], ImageFile], data: bytes) -> Iterator[ImageFile]:
    """The picture with its header read. What Pillow raises here and in the block becomes a refusal."""
    with _refusing(RejectReason.BAD_HEADER):
        picture = plugin(io.BytesIO(data))
    with picture, _refusing(RejectReason.CORRUPT_SCAN):
        yield picture


@contextmanager
def _refusing(otherwise: RejectReason) -> Iterator[None]:
    try:
        yield
    except _AT_THE_END as error:
        raise Refused(RejectReason.TRUNCATED, f"Pillow: {error}") from error
    except _UNEXPECTED as error:
        message = str(error)
        if "out of memory" in message or message == "decoder error -9":
            raise MemoryError(message) from error
        reason = next((reason for words, reason in _REASONS.items() if words in message), otherwise)
        raise Refused(reason, f"Pillow: {message}") from error


def loaded(picture: ImageFile) -> np.ndarray:
    """The pixels of a picture, H x W x 3, or 4 if it has transparency."""
    picture.load()
    return np.asarray(picture.convert("RGBA" if "A" in picture.mode else "RGB"))


def to_srgb_over_white(pixels_HWC: np.ndarray, profile: bytes | None, notes: list[str]) -> np.ndarray:
    """H x W x 3 of the pixels that `loaded` returned, by the colour profile of the file."""
    color_HWC = to_srgb(pixels_HWC[:, :, :3], profile, notes)
    return flatten_over_white(color_HWC, pixels_HWC[:, :, 3], notes) if pixels_HWC.shape[2] == 4 else color_HWC


def decode_plain_gray(plugin: Callable[[io.BytesIO], ImageFile], plain_file: bytes) -> np.ndarray:
    """The 8-bit samples, H x W, of a file that we wrote; refuses compressed data that is damaged or ends too early."""
    try:
        with opened(plugin, plain_file) as picture:
            picture.load()
            if picture.mode != "L":
                raise AssertionError(f"a plain gray file was read as {picture.mode}")
            return np.asarray(picture)
    except Refused as refusal:
        # The file that we wrote has all of it: what ends early is the data.
        raise Refused(RejectReason.CORRUPT_SCAN, refusal.detail) from refusal
