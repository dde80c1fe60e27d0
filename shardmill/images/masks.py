"""Masks: a class number for each pixel of an image, moved by the geometry of the pixels and stored as PNG.

A mask is a PNG of one channel with at most 8 bits, gray or with a palette, whose numbers are then the values.
Nothing is interpolated: each stored pixel has the value of one pixel of the source. Shape legend: H height, W width.
"""

from __future__ import annotations

import zlib

import numpy as np

from shardmill.images.geometry import Geometry, Span
from shardmill.images.pixels import Refused, decode_with_opencv, expect_size
from shardmill.images.png import GRAY, PALETTE, SIGNATURE, read_chunks
from shardmill.values import RejectReason

MAX_BITS = 8


def decode_mask(data: bytes) -> np.ndarray:
    """The values of a mask as its file has them, uint8 (H, W). Raises `Refused` for what is no such PNG."""
    if not data.startswith(SIGNATURE):
        raise Refused(RejectReason.BAD_MASK, "not a PNG, which a mask must be")
    header, others = read_chunks(data)
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    depth, color_type = header[8], header[9]
    if color_type not in (GRAY, PALETTE) or depth > MAX_BITS:
        raise Refused(
            RejectReason.BAD_MASK,
            f"a PNG of colour type {color_type} with {depth} bits; a mask is gray or has a palette, of at most 8 bits",
        )
    # As gray, whatever colours a palette gives to the numbers.
    gray = header[:9] + bytes([GRAY]) + header[10:]
    mask_HWC = decode_with_opencv(SIGNATURE + _chunk(b"IHDR", gray) + others, keep_alpha_and_depth=True)
    expect_size(mask_HWC, height, width)
    mask_HW = mask_HWC[:, :, 0]
    # OpenCV spreads fewer bits over the range of eight.
    return mask_HW if depth == MAX_BITS else mask_HW // (255 // ((1 << depth) - 1))


def size_of_mask(data: bytes) -> tuple[int, int] | None:
    """Height and width that a PNG declares, before anything of that size is allocated; None for other bytes."""
    sides = data[16:24]
    return (int.from_bytes(sides[4:]), int.from_bytes(sides[:4])) if data.startswith(SIGNATURE) else None


def move_mask(mask_HW: np.ndarray, geometry: Geometry) -> np.ndarray:
    """A mask of the upright source as that of its stored image; 0 where that is black."""
    rows, columns = nearest(geometry.rows, geometry.height), nearest(geometry.columns, geometry.width)
    stored_HW = np.zeros((geometry.stored_height, geometry.stored_width), np.uint8)
    place = (
        slice(geometry.top, geometry.top + geometry.height),
        slice(geometry.left, geometry.left + geometry.width),
    )
    stored_HW[place] = mask_HW[np.ix_(rows, columns)]
    return stored_HW


def nearest(kept: Span, length: int) -> np.ndarray:
    """For each of `length` pixels the one of a kept range in which its centre lies: int64."""
    return kept.start + (2 * np.arange(length, dtype=np.int64) + 1) * kept.length // (2 * length)


def _chunk(kind: bytes, payload: bytes) -> bytes:
    return len(payload).to_bytes(4) + kind + payload + zlib.crc32(kind + payload).to_bytes(4)
