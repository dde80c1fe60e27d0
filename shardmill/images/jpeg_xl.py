"""Decodes a JPEG XL with libjxl, upright; its header is read here, as the plugin decodes at once."""

from __future__ import annotations

import io
from dataclasses import dataclass

from shardmill.images.exif import orient
from shardmill.images.pillow import decode_first_frame
from shardmill.images.pixels import DecodedImage, Refused, check_dimensions, expect_size
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

_CODESTREAM = b"\xff\x0a"
_MAX_BOXES = 1_000
# ISO/IEC 18181-1, SizeHeader: the width as a share of the height; 0 means that the file says it.
_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
_SIZE_BITS = (9, 13, 18, 30)
# PreviewHeader: bits of a side, in units of eight pixels or of one.
_PREVIEW_EIGHTHS = (0, 0, 5, 9)
_PREVIEW_PIXELS = (6, 8, 10, 12)
# All that is read here has at most 175 bits, behind a signature of two bytes.
_MAX_HEAD_BYTES = 24


def decode_jpeg_xl(data: bytes, options: NormalizeOptions) -> DecodedImage:
    from pillow_jxl import JpegXLImagePlugin

    # The pool of workers already uses every core.
    JpegXLImagePlugin.DECODE_THREADS = 0
    header = _read_header(data)
    check_dimensions(header.height, header.width, options)
    if header.is_animated:
        # The plugin decodes every frame, and gives the last one.
        raise Refused(RejectReason.UNSUPPORTED_MODE, "jpeg_xl with an animation")
    frame = decode_first_frame(JpegXLImagePlugin.JXLImageFile, data, options)
    # libjxl turns what it decodes; of a file made from a JPEG the plugin takes that JPEG, as the camera held it.
    orientation = header.orientation if getattr(frame.picture, "jpeg", False) else 1
    upright_HWC = orient(frame.pixels_HWC, orientation, frame.notes)
    upright = (header.width, header.height) if header.orientation > 4 else (header.height, header.width)
    expect_size(upright_HWC, *upright)
    return DecodedImage(upright_HWC, tuple(frame.notes), orientation=orientation)


@dataclass(frozen=True, slots=True)
class _Header:
    """What the head of a codestream declares, in pixels that are not turned yet."""

    height: int
    width: int
    orientation: int
    """As in EXIF: 1 is upright."""
    is_animated: bool


def _read_header(data: bytes) -> _Header:
    bits = _Bits(_codestream(data)[2:])
    height, width = _size(bits)
    is_all_default = bits.take(1)
    if is_all_default or not bits.take(1):
        return _Header(height, width, 1, is_animated=False)
    orientation = 1 + bits.take(3)
    if bits.take(1):
        _size(bits)
    if bits.take(1):
        _skip_preview(bits)
    return _Header(height, width, orientation, is_animated=bool(bits.take(1)))


def _size(bits: _Bits) -> tuple[int, int]:
    """Height and width."""
    if bits.take(1):
        height = 8 * (1 + bits.take(5))
        ratio = _RATIOS.get(bits.take(3))
        width = 8 * (1 + bits.take(5)) if ratio is None else height * ratio[0] // ratio[1]
    else:
        height = 1 + bits.take(_SIZE_BITS[bits.take(2)])
        ratio = _RATIOS.get(bits.take(3))
        width = 1 + bits.take(_SIZE_BITS[bits.take(2)]) if ratio is None else height * ratio[0] // ratio[1]
    return height, width


def _skip_preview(bits: _Bits) -> None:
    sides = _PREVIEW_EIGHTHS if bits.take(1) else _PREVIEW_PIXELS
    bits.take(sides[bits.take(2)])
    if bits.take(3) == 0:
        bits.take(sides[bits.take(2)])


def _codestream(data: bytes) -> bytes:
    """The file itself, or the first part of the codestream in its boxes."""
    if data.startswith(_CODESTREAM):
        return data[:_MAX_HEAD_BYTES]
    stream = io.BytesIO(data)
    for _ in range(_MAX_BOXES):
        start = stream.tell()
        head = stream.read(8)
        if len(head) < 8:
            break
        size, name = int.from_bytes(head[:4], "big"), head[4:]
        if size == 1:
            size = int.from_bytes(stream.read(8), "big")
        # A size of 0 means up to the end; what follows the box is none of it.
        in_box = start + size - stream.tell() if size else _MAX_HEAD_BYTES
        payload = stream.read(max(0, min(in_box, 4 + _MAX_HEAD_BYTES)))
        if name in (b"jxlc", b"jxlp"):
            # A part begins with its number.
            codestream = payload if name == b"jxlc" else payload[4:]
            if codestream.startswith(_CODESTREAM):
                return codestream
            break
        if size < 8:
            break
        stream.seek(start + size)
    raise Refused(RejectReason.BAD_HEADER, "no codestream")


class _Bits:
    """Bits of a codestream, the lowest of each byte first."""

    def __init__(self, data: bytes) -> None:
        self._left, self._value = 8 * len(data), int.from_bytes(data, "little")

    def take(self, number: int) -> int:
        if number > self._left:
            raise Refused(RejectReason.TRUNCATED, "the header ends early")
        taken = self._value & ((1 << number) - 1)
        self._value >>= number
        self._left -= number
        return taken
