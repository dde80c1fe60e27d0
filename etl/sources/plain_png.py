"""Writes raw pixels as PNG bytes that depend only on the pixels: stored, not compressed.

A compressor's next release would make other bytes, and with them other content hashes and so other splits.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

_MAX_STORED = 65_535
_GRAY, _RGB = 0, 2


def plain_png(pixels: np.ndarray) -> bytes:
    """PNG bytes of uint8 pixels, HW or HW3. Lossless."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    # Each row begins with the number of its filter: 0, none.
    raw = np.hstack([np.zeros((height, 1), np.uint8), rows]).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB if pixels.ndim == 3 else _GRAY, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", _stored(raw)) + _chunk(b"IEND", b"")


def _stored(data: bytes) -> bytes:
    """A zlib stream (RFC 1950) of stored blocks (RFC 1951, 3.2.4)."""
    parts = [b"\x78\x01"]
    for start in range(0, len(data), _MAX_STORED):
        block = data[start : start + _MAX_STORED]
        is_last = start + _MAX_STORED >= len(data)
        parts.append(struct.pack("<BHH", is_last, len(block), len(block) ^ 0xFFFF) + block)
    return b"".join(parts) + struct.pack(">I", zlib.adler32(data))


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
