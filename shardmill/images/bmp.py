"""Decodes BMP with Pillow; run-length encoded files with OpenCV, because Pillow fills in missing data of a damaged
file.
"""

from __future__ import annotations

import numpy as np
from PIL.BmpImagePlugin import BmpImageFile

from shardmill.images.pillow import opened
from shardmill.images.pixels import (
    DecodedImage,
    Refused,
    check_dimensions,
    decode_with_opencv,
    expect_size,
    flatten_over_white,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

CORE_HEADER_BYTES = 12
RUN_LENGTHS, EMBEDDED = (1, 2), (4, 5)
"""Values of the field for the compression."""


def decode_bmp(data: bytes, options: NormalizeOptions) -> DecodedImage:
    # The oldest header has no such field.
    has_compression = int.from_bytes(data[14:18], "little") > CORE_HEADER_BYTES
    compression = int.from_bytes(data[30:34], "little") if has_compression else 0
    if compression in EMBEDDED:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=bmp around a jpeg or png")
    with opened(BmpImageFile, data) as picture:
        check_dimensions(picture.height, picture.width, options)
        if compression in RUN_LENGTHS:
            pixels_HWC = decode_with_opencv(data, keep_alpha_and_depth=False)
            expect_size(pixels_HWC, picture.height, picture.width)
        else:
            pixels_HWC = np.asarray(picture.convert("RGBA" if picture.mode == "RGBA" else "RGB"))
    notes: list[str] = []
    if pixels_HWC.shape[2] == 4:
        pixels_HWC = flatten_over_white(pixels_HWC[:, :, :3], pixels_HWC[:, :, 3], notes)
    return DecodedImage(pixels_HWC, notes=tuple(notes))
