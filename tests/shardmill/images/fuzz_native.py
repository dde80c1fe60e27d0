"""Calls every function of the native kernel with damaged input; run by `test_native_kernel.py` under the sanitizers.

    python fuzz_native.py FOLDER SEED COUNT

FOLDER has a build of the kernel. A sanitizer ends the process with its report, so reaching the end is the result, and
a digest of all answers, which two builds of one version share.
"""

from __future__ import annotations

import hashlib
import io
import random
import struct
import sys

import numpy as np
from PIL import Image


def main(folder: str, seed: int, count: int) -> None:
    sys.path.insert(0, folder)
    import shardmill_native as native

    assert native.__file__.startswith(folder)
    rng = random.Random(seed)
    jpegs = list(_jpegs(np.random.default_rng(seed)))
    records = b"".join(_record(rng, rng.choice(jpegs)[0]) for _ in range(5))
    tables = np.full((3, 256), 1 << 14, np.int32), np.full((3, 3), -21845, np.int32), np.zeros((1 << 14) + 1, np.uint8)
    names = (b"image/encoded", b"image/class/label", b"n")
    num_decoded, answers = 0, hashlib.sha256()
    for _ in range(count):
        data, shape = rng.choice(jpegs)
        damaged = _damaged(rng, data)
        height, width, channels = shape
        place = _window(rng, height, width)
        target = np.empty(place[2] * place[3] * channels, np.uint8)
        is_done = np.zeros(1, np.uint8)
        native.decode_jpegs([damaged], shape, np.array([[*place, 0]], np.int64), target, is_done)
        num_decoded += int(is_done[0])
        answers.update(target if is_done[0] else b"declined")
        scale = rng.choice((1, 2, 4, 8))
        box = _window(rng, -(-height // scale), -(-width // scale))
        new_shape = (rng.randint(-(-box[2] // 64), box[2]), rng.randint(-(-box[3] // 64), box[3]), channels)
        pixels_HWC, colours = np.empty(new_shape, np.uint8), rng.choice((tables, ()))
        is_shrunk = native.shrink_jpeg(damaged, pixels_HWC, (height, width), scale, box, *colours)
        answers.update(pixels_HWC if is_shrunk else b"declined")
        scan_or_end = native.find_scan_or_end(damaged, rng.randrange(len(damaged) + 2))
        segments, places = native.find_segments(damaged, 64), native.find_values(_damaged(rng, records), names)
        answers.update(repr((scan_or_end, segments, places)).encode())
    print(f"{native.KERNEL_ID}: {count} damaged inputs, {num_decoded} decoded, answers {answers.hexdigest()}")


def _jpegs(rng: np.random.Generator):
    """JPEGs of all kinds that the kernel decodes, with their shapes."""
    for side in (8, 33, 96):
        for channels in (1, 3):
            noise_HWC = rng.integers(0, 256, (6, 6, channels)).astype(np.uint8).squeeze()
            image = Image.fromarray(noise_HWC).resize((side, side + 7))
            for subsampling in (0, 1, 2):
                for options in ({}, {"progressive": True}, {"restart_marker_blocks": 2}, {"optimize": True}):
                    file = io.BytesIO()
                    image.save(file, "JPEG", quality=80, subsampling=subsampling, **options)
                    yield file.getvalue(), (side + 7, side, channels)


def _damaged(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        damaged[rng.randrange(len(damaged))] = rng.choice((0, 0xFF, rng.randrange(256)))
    kind = rng.randrange(8)
    if kind == 0:
        del damaged[rng.randrange(1, len(damaged)) :]
    elif kind == 1:
        start = rng.randrange(len(damaged))
        damaged[start : start + rng.randrange(64)] = rng.randbytes(rng.randrange(64))
    return bytes(damaged) or b"\0"


def _window(rng: random.Random, height: int, width: int) -> tuple[int, int, int, int]:
    kept_height, kept_width = rng.randint(1, height), rng.randint(1, width)
    return rng.randint(0, height - kept_height), rng.randint(0, width - kept_width), kept_height, kept_width


def _record(rng: random.Random, image: bytes) -> bytes:
    def field(number: int, payload: bytes) -> bytes:
        length, size = bytearray(), len(payload)
        while size > 0x7F:
            length.append(size & 0x7F | 0x80)
            size >>= 7
        return bytes([number << 3 | 2]) + bytes([*length, size]) + payload

    features = b"".join(
        field(1, field(1, name) + field(2, value))
        for name, value in (
            (b"image/encoded", field(1, field(1, image))),
            (b"image/class/label", field(3, field(1, bytes([rng.randrange(128)])))),
        )
    )
    message = field(1, features)
    return struct.pack("<QI", len(message), 0) + message + bytes(4)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
