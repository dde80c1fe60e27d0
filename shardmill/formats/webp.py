"""The stored encoding `webp`: lossy WebP, one plain VP8 image a file.

OpenCV's wheels bring libwebp, so readers need no other package. Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import cv2
import numpy as np

from shardmill.formats.encodings import StoredEncoding
from shardmill.options import NormalizeOptions

_VP8_START_CODE = b"\x9d\x01\x2a"
_VP8L_SIGNATURE = 0x2F


def _encode(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    # WebP knows no gray: libwebp stores colour planes that are constant, which cost next to nothing.
    conversion = cv2.COLOR_GRAY2BGR if image_HWC.shape[2] == 1 else cv2.COLOR_RGB2BGR
    stored = cv2.cvtColor(image_HWC, conversion)
    _, encoded = cv2.imencode(".webp", stored, [cv2.IMWRITE_WEBP_QUALITY, options.webp_quality])
    return encoded.tobytes()


def _decode(data: bytes | memoryview, shape_HWC: tuple[int, ...], out_HWC: np.ndarray | None) -> np.ndarray:
    pixels_HWC = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels_HWC is None:
        raise ValueError("OpenCV could not decode it")
    if shape_HWC[2] == 1:
        # Green is the middle of three channels that rounding may set apart by a level.
        return np.ascontiguousarray(pixels_HWC[:, :, 1:2])
    return cv2.cvtColor(pixels_HWC, cv2.COLOR_BGR2RGB)


def _read_size(data: bytes | memoryview) -> tuple[int, int]:
    head = bytes(data[:30])
    if head[:4] != b"RIFF" or head[8:12] != b"WEBP" or len(head) < 30:
        raise ValueError("it does not begin like a WebP")
    # An extended file (VP8X) may hold alpha or an animation, whose frames need not have the canvas' size.
    if head[12:16] == b"VP8 " and head[23:26] == _VP8_START_CODE:
        return int.from_bytes(head[28:30], "little") & 0x3FFF, int.from_bytes(head[26:28], "little") & 0x3FFF
    if head[12:16] == b"VP8L" and head[20] == _VP8L_SIGNATURE:
        bits = int.from_bytes(head[21:25], "little")
        return 1 + (bits >> 14 & 0x3FFF), 1 + (bits & 0x3FFF)
    raise ValueError("it is not one plain WebP image")


WEBP = StoredEncoding(_encode, _decode, _read_size, bytes_per_value=0.1, is_lossless=False)
