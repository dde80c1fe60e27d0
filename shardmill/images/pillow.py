"""Decodes the formats that Pillow decodes best: GIF, BMP, AVIF, HEIC and JPEG XL, one plugin at a time, with its errors
as rejections.

No other plugin is reached. Pillow's limit on pixels is a global that knows nothing of our options: sizes are checked
here. OpenCV's wheels read no GIF before 4.12; it decodes run-length encoded BMPs, as Pillow fills in missing data of a
damaged one. AVIF and HEIC are turned as the container says. The header of JPEG XL is read here, as its plugin decodes
at once.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.Image import DecompressionBombError

from shardmill.images.exif import orient, read_orientation
from shardmill.images.icc import to_srgb
from shardmill.images.pixels import (
    DecodedImage,
    Refused,
    check_allocation,
    check_dimensions,
    decode_with_opencv,
    expect_size,
    flatten_over_white,
)
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile


# Words of Pillow's messages.
_REASONS = {
    "runcated": RejectReason.TRUNCATED,
    "not enough image data": RejectReason.TRUNCATED,
    "Unsupported BMP": RejectReason.UNSUPPORTED_MODE,
    "decompression bomb": RejectReason.TOO_MANY_PIXELS,
}
# What plugins raise for bytes that they do not expect; `SyntaxError` is Pillow's own word for another format, and
# `RuntimeError` what libavif's raises.
_UNEXPECTED = (SyntaxError, EOFError, ValueError, TypeError, RuntimeError, DecompressionBombError, OSError)
_AT_THE_END = (IndexError, struct.error)


@dataclass(frozen=True, slots=True, eq=False)
class FirstFrame:
    """What a plugin has decoded."""

    pixels_HWC: np.ndarray
    """H x W x 3 in sRGB, on white if it has transparency."""
    notes: list[str]
    picture: ImageFile
    """Closed: what the plugin says of the file."""


def decode_first_frame(plugin: Callable[[io.BytesIO], ImageFile], data: bytes, options: NormalizeOptions) -> FirstFrame:
    """The first frame of a file, in the size that its header declares and that is within the limits."""
    with opened(plugin, data) as picture:
        width, height = picture.size
        check_dimensions(height, width, options)
        pixels_HWC = loaded(picture)
        num_frames = getattr(picture, "n_frames", 1)
    expect_size(pixels_HWC, height, width)
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    return FirstFrame(to_srgb_over_white(pixels_HWC, picture.info.get("icc_profile"), notes), notes, picture)


@contextmanager
def opened(plugin: Callable[[io.BytesIO], ImageFile], data: bytes) -> Iterator[ImageFile]:
    """The picture with its header read. What Pillow raises here and in the block becomes a refusal."""
    with _refusing(RejectReason.BAD_HEADER):
        picture = plugin(io.BytesIO(data))
    with picture, _refusing(RejectReason.CORRUPT_SCAN):
        yield picture


@contextmanager
def _refusing(otherwise: RejectReason) -> Iterator[None]:
    try:
        yield
    except _AT_THE_END as error:
        raise Refused(RejectReason.TRUNCATED, f"Pillow: {error}") from error
    except _UNEXPECTED as error:
        message = str(error)
        if "out of memory" in message or message == "decoder error -9":
            raise MemoryError(message) from error
        reason = next((reason for words, reason in _REASONS.items() if words in message), otherwise)
        raise Refused(reason, f"Pillow: {message}") from error


def loaded(picture: ImageFile) -> np.ndarray:
    """The pixels of a picture, H x W x 3, or 4 if it has transparency."""
    picture.load()
    return np.asarray(picture.convert("RGBA" if "A" in picture.mode else "RGB"))


def to_srgb_over_white(pixels_HWC: np.ndarray, profile: bytes | None, notes: list[str]) -> np.ndarray:
    """H x W x 3 of the pixels that `loaded` returned, by the colour profile of the file."""
    color_HWC = to_srgb(pixels_HWC[:, :, :3], profile, notes)
    return flatten_over_white(color_HWC, pixels_HWC[:, :, 3], notes) if pixels_HWC.shape[2] == 4 else color_HWC


def decode_plain_gray(plugin: Callable[[io.BytesIO], ImageFile], plain_file: bytes) -> np.ndarray:
    """The 8-bit samples, H x W, of a file that we wrote; refuses compressed data that is damaged or ends too early."""
    try:
        with opened(plugin, plain_file) as picture:
            picture.load()
            if picture.mode != "L":
                raise AssertionError(f"a plain gray file was read as {picture.mode}")
            return np.asarray(picture)
    except Refused as refusal:
        # The file that we wrote has all of it: what ends early is the data.
        raise Refused(RejectReason.CORRUPT_SCAN, refusal.detail) from refusal


def decode_gif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    if len(data) < 13:
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    width, height = struct.unpack_from("<HH", data, 6)
    check_dimensions(height, width, options)
    with opened(GifImageFile, data) as picture:
        assert isinstance(picture, GifImageFile)
        # Pillow makes the picture as large as a frame that hangs over the screen; what hangs over is not shown.
        left, top, right, bottom = picture.tile[0].extents or (0, 0, width, height)
        check_allocation(bottom - top, right - left, options)
        if left >= width or top >= height:
            raise Refused(RejectReason.BAD_HEADER, "the first frame lies outside the screen")
        picture.load()
        if picture.mode == "P" and picture.palette is not None:
            # Pillow makes a colour that the palette lacks black.
            last, num_colors = picture.getextrema()[1], len(picture.palette.palette) // 3
            if isinstance(last, int) and last >= num_colors:
                raise Refused(RejectReason.CORRUPT_SCAN, f"colour {last} of {num_colors}")
        rgba_HWC = np.asarray(picture.convert("RGBA"))[:height, :width]
        num_frames = picture.n_frames
    # Pillow gives what the frame leaves free the background's colour; no viewer shows that.
    alpha_HW = np.zeros((height, width), dtype=np.uint8)
    window = (slice(top, bottom), slice(left, right))
    alpha_HW[window] = rgba_HWC[window][:, :, 3]
    notes = [f"first_frame_of_{num_frames}"] if num_frames > 1 else []
    return DecodedImage(flatten_over_white(rgba_HWC[:, :, :3], alpha_HW, notes), notes=tuple(notes))


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


def decode_avif(data: bytes, options: NormalizeOptions) -> DecodedImage:
    # Workers that meet none do not load its library.
    from PIL import AvifImagePlugin

    if not AvifImagePlugin.SUPPORTED:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=avif; this Pillow was built without it")
    # The pool of workers already uses every core.
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    frame = decode_first_frame(AvifImagePlugin.AvifImageFile, data, options)
    # Pillow has put the container's own turn there, which goes before that of the camera's EXIF.
    orientation = read_orientation(frame.picture.info.get("exif"))
    upright_HWC = orient(frame.pixels_HWC, orientation, frame.notes)
    return DecodedImage(upright_HWC, tuple(frame.notes), orientation=orientation)


def decode_heic(data: bytes, options: NormalizeOptions) -> DecodedImage:
    import pillow_heif

    # The pool of workers already uses every core; previews in the file are not asked for.
    pillow_heif.options.DECODE_THREADS = 1
    pillow_heif.options.THUMBNAILS = False
    frame = decode_first_frame(pillow_heif.HeifImageFile, data, options)
    return DecodedImage(frame.pixels_HWC, notes=tuple(frame.notes))


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
    header = _read_jpeg_xl_header(data)
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
class _JpegXlHeader:
    """What the head of a codestream declares, in pixels that are not turned yet."""

    height: int
    width: int
    orientation: int
    """As in EXIF: 1 is upright."""
    is_animated: bool


def _read_jpeg_xl_header(data: bytes) -> _JpegXlHeader:
    bits = _Bits(_codestream(data)[2:])
    height, width = _read_size(bits)
    is_all_default = bits.take(1)
    if is_all_default or not bits.take(1):
        return _JpegXlHeader(height, width, 1, is_animated=False)
    orientation = 1 + bits.take(3)
    if bits.take(1):
        _read_size(bits)
    if bits.take(1):  # the size of a preview
        sides = _PREVIEW_EIGHTHS if bits.take(1) else _PREVIEW_PIXELS
        bits.take(sides[bits.take(2)])
        if bits.take(3) == 0:
            bits.take(sides[bits.take(2)])
    return _JpegXlHeader(height, width, orientation, is_animated=bool(bits.take(1)))


def _read_size(bits: _Bits) -> tuple[int, int]:
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
