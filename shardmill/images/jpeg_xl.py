"""Decodes the first frame of a JPEG XL with libjxl, upright; its size is read here, as the plugin decodes at once."""

from __future__ import annotations

import io

from shardmill.images.pillow import loaded, opened, to_srgb_over_white
from shardmill.images.pixels import DecodedImage, Refused, check_dimensions
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

_CODESTREAM = b"\xff\x0a"
_MAX_BOXES = 1_000
# ISO/IEC 18181-1, SizeHeader: the width as a share of the height; 0 means that the file says it.
_RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
_SIZE_BITS = (9, 13, 18, 30)


def decode_jpeg_xl(data: bytes, options: NormalizeOptions) -> DecodedImage:
    from pillow_jxl import JpegXLImagePlugin

    # The pool of workers already uses every core.
    JpegXLImagePlugin.DECODE_THREADS = 0
    check_dimensions(*_declared_size(data), options)
    with opened(JpegXLImagePlugin.JXLImageFile, data) as picture:
        # Turned: height and width may be exchanged.
        pixels_HWC = loaded(picture)
        profile = picture.info.get("icc_profile")
    notes: list[str] = []
    return DecodedImage(to_srgb_over_white(pixels_HWC, profile, notes), notes=tuple(notes))


def _declared_size(data: bytes) -> tuple[int, int]:
    """Height and width at the head of the codestream."""
    bits = _Bits(_codestream(data)[2:10])
    if bits.take(1):
        height = 8 * (1 + bits.take(5))
        ratio = _RATIOS.get(bits.take(3))
        width = 8 * (1 + bits.take(5)) if ratio is None else height * ratio[0] // ratio[1]
    else:
        height = 1 + bits.take(_SIZE_BITS[bits.take(2)])
        ratio = _RATIOS.get(bits.take(3))
        width = 1 + bits.take(_SIZE_BITS[bits.take(2)]) if ratio is None else height * ratio[0] // ratio[1]
    return height, width


def _codestream(data: bytes) -> bytes:
    """The file itself, or the first part of the codestream in its boxes."""
    if data.startswith(_CODESTREAM):
        return data
    stream = io.BytesIO(data)
    for _ in range(_MAX_BOXES):
        start = stream.tell()
        head = stream.read(8)
        if len(head) < 8:
            break
        size, name = int.from_bytes(head[:4], "big"), head[4:]
        if size == 1:
            size = int.from_bytes(stream.read(8), "big")
        payload = stream.read(16)
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
