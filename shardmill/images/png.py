"""Decodes PNG: checks the checksum of every chunk, and passes only the chunks that form pixels to libpng.

Dropping the others disarms metadata bombs, and keeps gamma, EXIF and animation from changing what is decoded.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.images.exif import orient, read_orientation
from shardmill.images.icc import MAX_PROFILE_BYTES, to_srgb
from shardmill.images.pixels import (
    TRAILING_NOTE,
    DecodedImage,
    Refused,
    check_dimensions,
    decode_with_opencv,
    expect_size,
    flatten_over_white,
    scale_to_8_bit,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

SIGNATURE = b"\x89PNG\r\n\x1a\n"
IHDR_BYTES = 13
PIXEL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"})
# Animation data is as large as the pixels, and we do not look at it: only its checksum is verified.
KEPT_CHUNKS = frozenset({b"acTL", b"eXIf", b"iCCP", b"sBIT"})
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
DEPTHS_BY_COLOR_TYPE = {
    GRAY: (1, 2, 4, 8, 16),
    RGB: (8, 16),
    PALETTE: (1, 2, 4, 8),
    GRAY_ALPHA: (8, 16),
    RGB_ALPHA: (8, 16),
}
# Honest writers cut pixels into pieces of kilobytes; without a limit, millions of empty chunks would each cost a look.
MAX_CHUNKS = 100_000


@dataclass(frozen=True, slots=True)
class PngHeader:
    """The declarations of the IHDR chunk."""

    height: int
    width: int
    depth: int
    """Bits per sample."""
    color_type: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk whose checksum was right."""

    type: bytes
    start: int
    end: int
    """Offset of the end of the whole chunk, including length and checksum."""

    def payload(self, data: bytes) -> bytes:
        return data[self.start + 8 : self.end - 4]


def decode_png(data: bytes, options: NormalizeOptions) -> DecodedImage:
    header = _read_header(data, options)
    chunks = [chunk for chunk in _walk_chunks(data) if chunk.type in PIXEL_CHUNKS | KEPT_CHUNKS]
    payloads = {chunk.type: chunk.payload(data) for chunk in chunks if chunk.type != b"IDAT"}
    if not any(chunk.type == b"IDAT" for chunk in chunks):
        raise Refused(RejectReason.BAD_HEADER, "no IDAT chunk")
    if header.color_type == PALETTE and b"PLTE" not in payloads:
        raise Refused(RejectReason.BAD_HEADER, "a palette image without a palette")

    notes: list[str] = []
    num_frames = int.from_bytes(payloads.get(b"acTL", b"")[:4])
    if num_frames > 1:
        notes.append(f"first_frame_of_{num_frames}")
    if chunks[-1].end < len(data):
        notes.append(TRAILING_NOTE)

    pixel_chunks = [data[chunk.start : chunk.end] for chunk in chunks if chunk.type in PIXEL_CHUNKS]
    bare_file = SIGNATURE + b"".join(pixel_chunks)
    pixels_HWC = decode_with_opencv(bare_file, keep_alpha_and_depth=True)
    expect_size(pixels_HWC, header.height, header.width)
    transparent_gray = _transparent_gray(payloads.get(b"tRNS"), header)
    alpha_HW: np.ndarray | None = None
    if transparent_gray is not None:
        alpha_HW = np.where(pixels_HWC[:, :, 0] == transparent_gray, 0, 255).astype(np.uint8)
    if pixels_HWC.shape[2] == 4:
        alpha_HW = pixels_HWC[:, :, 3]
    # OpenCV makes three equal channels of gray with alpha; a profile of gray describes one.
    color_HWC = pixels_HWC[:, :, : 1 if header.color_type in (GRAY, GRAY_ALPHA) else 3]
    declared_bits = _declared_bits(payloads.get(b"sBIT", b""), color_HWC)
    color_HWC, alpha_HW = scale_to_8_bit(color_HWC, alpha_HW, declared_bits, options, notes)
    pixels_HWC = to_srgb(color_HWC, _read_profile(payloads.get(b"iCCP")), notes)
    if alpha_HW is not None:
        pixels_HWC = flatten_over_white(pixels_HWC, alpha_HW, notes)
    orientation = read_orientation(payloads.get(b"eXIf"))
    pixels_HWC = orient(pixels_HWC, orientation, notes)
    is_bare = options.keep_bytes and header.depth == 8 and header.color_type in (GRAY, RGB) and alpha_HW is None
    return DecodedImage(pixels_HWC, tuple(notes), bare_file if is_bare else None, orientation=orientation)


def read_chunks(data: bytes) -> tuple[bytes, bytes]:
    """The payload of a file's header, and its chunks of pixels as they lie in the file. All checksums are verified."""
    chunks = list(_walk_chunks(data))
    if chunks[0].type != b"IHDR" or len(header := chunks[0].payload(data)) != IHDR_BYTES:
        raise Refused(RejectReason.BAD_HEADER, "the first chunk is not an IHDR of 13 bytes")
    pixels = (chunk for chunk in chunks if chunk.type in (b"IDAT", b"IEND"))
    return header, b"".join(data[chunk.start : chunk.end] for chunk in pixels)


def _read_header(data: bytes, options: NormalizeOptions) -> PngHeader:
    """Checked before the rest of the file is looked at."""
    header = data[8 : 8 + 8 + IHDR_BYTES + 4]
    if len(header) < 8 + IHDR_BYTES + 4:
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    if header[:8] != IHDR_BYTES.to_bytes(4) + b"IHDR":
        raise Refused(RejectReason.BAD_HEADER, "the first chunk is not an IHDR of 13 bytes")
    if zlib.crc32(header[4:-4]) != int.from_bytes(header[-4:]):
        raise Refused(RejectReason.CHECKSUM, "chunk IHDR at byte 8")
    width, height = int.from_bytes(header[8:12]), int.from_bytes(header[12:16])
    depth, color_type, compression, filtering, interlace = header[16:21]
    if depth not in DEPTHS_BY_COLOR_TYPE.get(color_type, ()):
        raise Refused(RejectReason.BAD_HEADER, f"colour type {color_type} with {depth} bits per sample")
    if compression or filtering or interlace > 1:
        raise Refused(RejectReason.BAD_HEADER, "an unknown compression, filter or interlace method")
    check_dimensions(height, width, options)
    return PngHeader(height=height, width=width, depth=depth, color_type=color_type)


def _walk_chunks(data: bytes) -> Iterator[Chunk]:
    position = len(SIGNATURE)
    view = memoryview(data)
    for _ in range(MAX_CHUNKS):
        if position + 12 > len(data):
            raise Refused(RejectReason.TRUNCATED, f"no IEND chunk in {len(data)} bytes")
        end = position + 12 + int.from_bytes(data[position : position + 4])
        type_ = data[position + 4 : position + 8]
        if end > len(data):
            raise Refused(RejectReason.TRUNCATED, f"a chunk ends at byte {end} of {len(data)}")
        if zlib.crc32(view[position + 4 : end - 4]) != int.from_bytes(data[end - 4 : end]):
            raise Refused(RejectReason.CHECKSUM, f"chunk {ascii(type_)[2:-1]} at byte {position}")
        yield Chunk(type=type_, start=position, end=end)
        if type_ == b"IEND":
            return
        position = end
    raise Refused(RejectReason.BAD_HEADER, f"more than {MAX_CHUNKS} chunks")


def _transparent_gray(transparency: bytes | None, header: PngHeader) -> int | None:
    """The decoded value that tRNS declares transparent in a gray image: OpenCV applies tRNS to colour only."""
    if header.color_type != GRAY or transparency is None or len(transparency) < 2:
        return None
    brightest = (1 << header.depth) - 1
    value = int.from_bytes(transparency[:2]) & brightest
    return value if header.depth >= 8 else value * 255 // brightest


def _declared_bits(significant: bytes, color_HWC: np.ndarray) -> int:
    """Of the samples, by their chunk sBIT; 0 if they are spread over all 16 bits, as the standard wants them.

    Then what lies below the declared bits repeats the highest ones, and is nothing but zeros in a dark image.
    """
    if color_HWC.dtype != np.uint16 or len(significant) < color_HWC.shape[2]:
        return 0
    num_bits = max(significant[: color_HWC.shape[2]])
    has_low_bits = num_bits < 16 and bool(np.any(color_HWC & ((1 << (16 - num_bits)) - 1)))
    return num_bits if has_low_bits else 0


def _read_profile(chunk: bytes | None) -> bytes | None:
    """The colour profile, None without one; empty if it does not unpack, and never much more than may be read."""
    if chunk is None:
        return None
    _, _, compressed = chunk.partition(b"\0")
    try:
        return zlib.decompressobj().decompress(compressed[1:], MAX_PROFILE_BYTES + 1)
    except zlib.error:
        return b""
