"""Writes the image files that OpenCV and simplejpeg cannot: animated GIF, EXIF orientation, PNG chunk by chunk."""

from __future__ import annotations

import struct
import zlib

import numpy as np

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
GIF_CLEAR_CODE, GIF_END_CODE = 256, 257
# A reader widens its codes beyond 9 bits when it has seen 254 of them since the last clear code.
GIF_CODES_PER_CLEAR = 250


def with_exif_orientation(jpeg: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF segment that holds this one tag."""
    directory = struct.pack("<HHHIHHI", 1, 0x0112, 3, 1, orientation, 0, 0)
    payload = b"Exif\0\0" + b"II*\0" + struct.pack("<I", 8) + directory
    return with_jpeg_segment(jpeg, 0xE1, payload)


def with_jpeg_segment(jpeg: bytes, marker: int, payload: bytes) -> bytes:
    """The JPEG with one more segment in front of all others."""
    return jpeg[:2] + bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload + jpeg[2:]


def png_chunk(chunk_type: bytes, payload: bytes) -> bytes:
    checksum = zlib.crc32(chunk_type + payload)
    return struct.pack(">I", len(payload)) + chunk_type + payload + struct.pack(">I", checksum)


def png_header(width: int, height: int, depth: int, color_type: int) -> bytes:
    """Signature and IHDR of a PNG that is not interlaced."""
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    return PNG_SIGNATURE + png_chunk(b"IHDR", header)


def encode_gif(frames_HW: list[np.ndarray]) -> bytes:
    """Gray frames of one size as a GIF; an animation if there are several. Stored without compression."""
    height, width = frames_HW[0].shape
    grays = bytes(gray for gray in range(256) for _ in range(3))
    parts = [b"GIF89a", struct.pack("<HHBBB", width, height, 0xF7, 0, 0), grays]
    for frame_HW in frames_HW:
        parts.append(b"\x21\xf9\x04" + struct.pack("<BHB", 0, 10, 0) + b"\0")  # shown for a tenth of a second
        parts.append(b"\x2c" + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x08")
        parts.append(_sub_blocks(_pack_codes(frame_HW.tobytes())))
    return b"".join(parts) + b"\x3b"


def _pack_codes(values: bytes) -> bytes:
    """One 9-bit code for each value, lowest bit first."""
    codes = []
    for start in range(0, len(values), GIF_CODES_PER_CLEAR):
        codes += [GIF_CLEAR_CODE, *values[start : start + GIF_CODES_PER_CLEAR]]
    bits = 0
    for position, code in enumerate([*codes, GIF_END_CODE]):
        bits |= code << 9 * position
    return bits.to_bytes((9 * (len(codes) + 1) + 7) // 8, "little")


def _sub_blocks(payload: bytes) -> bytes:
    pieces = [payload[start : start + 255] for start in range(0, len(payload), 255)]
    return b"".join(bytes((len(piece),)) + piece for piece in pieces) + b"\0"
