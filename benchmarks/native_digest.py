"""Prints one digest of what the installed native kernel computes from JPEGs, sound and damaged, to compare machines.

python benchmarks/native_digest.py DIR

Equal digests from the wheels of two machines mean equal pixels. It needs NumPy and the kernel alone, so that it runs
under an emulator, too.
"""

from __future__ import annotations

import hashlib
import platform
import struct
import sys
from pathlib import Path

import numpy as np
import shardmill_native

SIDE = 160
WINDOW = 100
NUM_FLIPPED = 5


def main() -> None:
    digest, generator = hashlib.sha256(), np.random.default_rng(1)
    num_files = num_damaged = 0
    for file in sorted(Path(sys.argv[1]).rglob("*.[jJ][pP]*[gG]")):
        data = file.read_bytes()
        height, width, channels = _shape_HWC(data)
        if channels not in (1, 3) or min(height, width) < SIDE:
            continue
        damaged = bytearray(data)
        for place in generator.integers(len(data) // 2, len(data), NUM_FLIPPED):
            damaged[place] ^= 0xFF
        num_files += _add(digest, data, (height, width, channels))
        num_damaged += _add(digest, bytes(damaged), (height, width, channels))
    print(
        f"{platform.machine()}, {shardmill_native.KERNEL_ID}: {num_files} files and {num_damaged} damaged, "
        f"sha256 {digest.hexdigest()}"
    )


def _add(digest: hashlib._Hash, data: bytes, shape_HWC: tuple[int, int, int]) -> bool:
    """Whether the kernel decoded the whole image; the digest takes that, and all pixels and sums."""
    height, width, channels = shape_HWC
    side = min(height, width)
    pixels_HWC = np.zeros((SIDE, SIDE, channels), dtype=np.uint8)
    square = (height - side) // 2, (width - side) // 2, side, side
    is_done = shardmill_native.shrink_jpeg(data, pixels_HWC, (height, width), 1, square)
    places = np.array([[height - WINDOW, (width - WINDOW) // 3, WINDOW, WINDOW, 0]], dtype=np.int64)
    window, is_window_done = np.zeros(WINDOW * WINDOW * channels, dtype=np.uint8), np.zeros(1, dtype=np.uint8)
    shardmill_native.decode_jpegs([data], shape_HWC, places, window, is_window_done)
    # Pixels of a file that the kernel declines may be anything.
    for done, array in ((is_done, pixels_HWC), (is_window_done[0], window)):
        digest.update(bytes([bool(done)]) + (array.tobytes() if done else b""))
    sums = shardmill_native.channel_sums(pixels_HWC), shardmill_native.laplacian_square_sum(pixels_HWC[..., 0].copy())
    digest.update(repr(sums).encode() if is_done else b"")
    return bool(is_done)


def _shape_HWC(data: bytes) -> tuple[int, int, int]:
    """From the frame header of a well-formed JPEG (ITU-T T.81, B.2.2)."""
    at = 2
    while data[at + 1] not in (0xC0, 0xC1, 0xC2):
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return struct.unpack(">HHB", data[at + 5 : at + 10])


if __name__ == "__main__":
    main()
