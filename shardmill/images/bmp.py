"""BMP to pixels: sizes and layout are checked here, OpenCV reads the rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from shardmill.images.pixels import (
    TRAILING_NOTE,
    DecodedImage,
    Refused,
    check_dimensions,
    decode_with_opencv,
    expect_size,
    flatten_over_white,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

CORE_HEADER_BYTES, INFO_HEADER_BYTES = 12, 40
UNCOMPRESSED, RLE8, RLE4, BITFIELDS, EMBEDDED_JPEG, EMBEDDED_PNG, ALPHA_BITFIELDS = 0, 1, 2, 3, 4, 5, 6
DEPTHS_BY_COMPRESSION = {
    UNCOMPRESSED: (1, 4, 8, 16, 24, 32),
    RLE8: (8,),
    RLE4: (4,),
    BITFIELDS: (16, 32),
    ALPHA_BITFIELDS: (32,),
}
BGRA_MASKS = (0x00FF0000, 0x0000FF00, 0x000000FF, 0xFF000000)


@dataclass(frozen=True, slots=True)
class BmpHeader:
    """The header's fields that decide how the rows are read."""

    height: int
    """Negative if the first stored row is the top one."""
    width: int
    depth_bits: int
    compression: int
    pixels_start: int
    masks: tuple[int, ...]
    """Red, green, blue and alpha; alpha is 0 if the header is too old to have it."""


def decode_bmp(data: bytes, options: NormalizeOptions) -> DecodedImage:
    header = _read_header(data)
    height, width = abs(header.height), header.width
    check_dimensions(height, width, options)
    if header.compression in (EMBEDDED_JPEG, EMBEDDED_PNG):
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=bmp around a jpeg or png")
    if header.depth_bits not in DEPTHS_BY_COMPRESSION.get(header.compression, ()):
        raise Refused(
            RejectReason.UNSUPPORTED_MODE, f"bmp with compression {header.compression} and {header.depth_bits} bits"
        )
    notes: list[str] = []
    if header.compression not in (RLE8, RLE4):
        row_bytes = (width * header.depth_bits + 31) // 32 * 4
        end = header.pixels_start + row_bytes * height
        if end > len(data):
            raise Refused(RejectReason.TRUNCATED, f"the pixels end at byte {end} of {len(data)}")
        if end + 3 < len(data) and int.from_bytes(data[2:6], "little") + 3 < len(data):
            notes.append(TRAILING_NOTE)

    if header.masks == BGRA_MASKS:
        pixels_HWC = _read_bgra(data, header, notes)
    else:
        pixels_HWC = decode_with_opencv(data, keep_alpha_and_depth=False)
    expect_size(pixels_HWC, height, width)
    return DecodedImage(pixels_HWC=pixels_HWC, notes=tuple(notes))


def _read_header(data: bytes) -> BmpHeader:
    pixels_start, header_bytes = struct.unpack_from("<II", data, 10)
    if len(data) < 14 + min(header_bytes, INFO_HEADER_BYTES):
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    if header_bytes == CORE_HEADER_BYTES:
        width, height, _, depth_bits = struct.unpack_from("<HHHH", data, 18)
        compression = UNCOMPRESSED
    else:
        width, height, _, depth_bits, compression = struct.unpack_from("<iiHHI", data, 18)
    masks: tuple[int, ...] = ()
    if compression in (BITFIELDS, ALPHA_BITFIELDS) and depth_bits == 32:
        # From version 3 (56 bytes) on the header itself holds an alpha mask; before, only ALPHA_BITFIELDS has one.
        num_masks = 4 if header_bytes >= 56 or compression == ALPHA_BITFIELDS else 3
        if len(data) < 54 + 4 * num_masks:
            raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
        masks = (*struct.unpack_from(f"<{num_masks}I", data, 54), 0)[:4]
        if masks[:3] != BGRA_MASKS[:3] or masks[3] not in (0, BGRA_MASKS[3]):
            raise Refused(RejectReason.UNSUPPORTED_MODE, "bmp with unusual channel masks")
    return BmpHeader(
        height=height,
        width=width,
        depth_bits=depth_bits,
        compression=compression,
        pixels_start=pixels_start,
        masks=masks,
    )


def _read_bgra(data: bytes, header: BmpHeader, notes: list[str]) -> np.ndarray:
    """OpenCV drops the alpha channel of these."""
    height, width = abs(header.height), header.width
    stored = np.frombuffer(data, dtype=np.uint8, count=height * width * 4, offset=header.pixels_start)
    pixels_HWC = stored.reshape(height, width, 4)[:: 1 if header.height < 0 else -1]
    return flatten_over_white(pixels_HWC[:, :, 2::-1], pixels_HWC[:, :, 3], notes)
