"""Stored encodings: one normalized image to the bytes that a shard holds, and back.

WebP is one plain lossy VP8 image a file: OpenCV's wheels bring libwebp, so readers need no other package. Shape legend:
H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import simplejpeg

from shardmill.errors import IntegrityError
from shardmill.formats.rows import Scattered
from shardmill.kernel import shardmill_native
from shardmill.options import ENCODINGS, NormalizeOptions

_copy_slices = getattr(shardmill_native, "copy_slices", None)

# Low effort: higher levels gain a few percent on photos and take several times as long.
PNG_COMPRESSION_LEVEL = 3
# From here on NumPy, which lets other threads run while it copies, is worth its call.
_LARGE_BYTES = 32_768


@dataclass(frozen=True, slots=True)
class StoredEncoding:
    """Reads and writes one stored encoding."""

    encode: Callable[[np.ndarray, NormalizeOptions], bytes]
    decode: Callable[[bytes | memoryview, tuple[int, ...], np.ndarray | None], np.ndarray]
    """(bytes, shape_HWC, where to decode to, if it can) -> uint8 pixels. Raises ValueError or cv2.error for bytes that
    are not such an image."""
    read_size: Callable[[bytes | memoryview], tuple[int, int] | None]
    """Height and width that the header declares; None for an encoding without a header."""
    bytes_per_value: float
    """Typical stored bytes per pixel and channel of a photograph: an estimate that balances work units."""
    is_lossless: bool
    """Whether decoding gives back the very pixels that were encoded."""
    copy_all: Callable[[Sequence[bytes | memoryview], np.ndarray], None] | None = None
    """Copies images that are stored as their pixels to images_NHWC; ValueError for another number of bytes."""

    @property
    def is_fixed_size(self) -> bool:
        """Whether every image of one shape takes the same number of bytes."""
        return self.copy_all is not None


def encode_image(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    """The bytes that a shard stores for a normalized image."""
    return ENCODINGS[options.encoding].encode(np.ascontiguousarray(image_HWC), options)


def decode_stored(
    data: bytes | memoryview, encoding: str, shape_HWC: tuple[int, int, int], out_HWC: np.ndarray | None = None
) -> np.ndarray:
    """Decode the output of `encode_image` to uint8 pixels of `shape_HWC`: to `out_HWC`, or to an array of its own
    (read-only for `raw`).

    Raises IntegrityError for bytes that are not an image of this encoding and shape.
    """
    return _decode(data, ENCODINGS[encoding], encoding, shape_HWC, out_HWC)


def decode_all(encoded: Sequence[bytes | memoryview], encoding: str, images_NHWC: np.ndarray) -> None:
    """Decode image n to `images_NHWC[n]`: a reader's hot path. Raises IntegrityError as `decode_stored`."""
    stored, shape_HWC = ENCODINGS[encoding], images_NHWC.shape[1:]
    if stored.copy_all is not None:
        try:
            stored.copy_all(encoded, images_NHWC)
        except ValueError as error:
            raise IntegrityError(f"a stored {encoding} image does not have the shape {shape_HWC}: {error}") from error
        return
    for data, image_HWC in zip(encoded, images_NHWC, strict=True):
        _decode(data, stored, encoding, shape_HWC, image_HWC)


def _decode(
    data: bytes | memoryview, stored: StoredEncoding, encoding: str, shape_HWC: tuple[int, ...],
    out_HWC: np.ndarray | None,
) -> np.ndarray:  # fmt: skip
    try:
        # The header first: a decompression bomb in a shard must be refused before it is unpacked.
        declared_HW = stored.read_size(data)
        if declared_HW is not None and declared_HW != shape_HWC[:2]:
            raise IntegrityError(f"a stored {encoding} image declares {declared_HW}", f"expected {shape_HWC[:2]}")
        image_HWC = stored.decode(data, shape_HWC, out_HWC)
    except (ValueError, cv2.error) as error:
        raise IntegrityError(f"a stored {encoding} image does not decode: {error}") from error
    if image_HWC.shape != shape_HWC or image_HWC.dtype != np.uint8:
        found = f"{image_HWC.dtype} of shape {image_HWC.shape}"
        raise IntegrityError(f"a stored {encoding} image has {found}", f"expected uint8 of shape {shape_HWC}")
    if out_HWC is None or image_HWC is out_HWC:
        return image_HWC
    np.copyto(out_HWC, image_HWC)
    return out_HWC


def decode_row(data: bytes | memoryview, options: NormalizeOptions) -> np.ndarray:
    """A row of a dataset that was normalized by `options`, of any size. Raises IntegrityError as `decode_stored`."""
    if options.one_shape_HWC is not None:
        return decode_stored(data, options.encoding, options.one_shape_HWC)
    try:
        size = ENCODINGS[options.encoding].read_size(data)
    except (ValueError, cv2.error) as error:
        raise IntegrityError(f"a stored {options.encoding} image does not decode: {error}") from error
    if size is None or size[0] * size[1] > options.max_stored_pixels:
        raise IntegrityError(
            f"a stored {options.encoding} image declares {size}", f"expected at most {options.max_stored_pixels} pixels"
        )
    return decode_stored(data, options.encoding, (*size, options.num_channels))


def _encode_jpeg(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    is_gray = image_HWC.shape[2] == 1
    return simplejpeg.encode_jpeg(
        image_HWC,
        quality=options.jpeg_quality,
        colorspace="GRAY" if is_gray else "RGB",
        colorsubsampling="Gray" if is_gray else "444",
    )


def _decode_jpeg(data: bytes | memoryview, shape_HWC: tuple[int, ...], out_HWC: np.ndarray | None) -> np.ndarray:
    colors = "GRAY" if shape_HWC[2] == 1 else "RGB"
    if out_HWC is None:
        return simplejpeg.decode_jpeg(data, colors)
    simplejpeg.decode_jpeg(data, colors, buffer=out_HWC)
    return out_HWC


def _read_jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    if data[:2] != b"\xff\xd8":
        raise ValueError("it does not begin like a JPEG")
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width)


def _encode_png(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    stored = image_HWC if image_HWC.shape[2] == 1 else cv2.cvtColor(image_HWC, cv2.COLOR_RGB2BGR)
    _, encoded = cv2.imencode(".png", stored, [cv2.IMWRITE_PNG_COMPRESSION, PNG_COMPRESSION_LEVEL])
    return encoded.tobytes()


def _decode_png(data: bytes | memoryview, shape_HWC: tuple[int, ...], out_HWC: np.ndarray | None) -> np.ndarray:
    pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise ValueError("OpenCV could not decode it")
    if pixels.ndim == 2:
        return pixels[:, :, np.newaxis]
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def _read_png_size(data: bytes | memoryview) -> tuple[int, int]:
    # All that OpenCV could take for another format, of another size, is refused.
    if data[:8] != b"\x89PNG\r\n\x1a\n" or data[12:16] != b"IHDR":
        raise ValueError("it does not begin like a PNG")
    if len(data) < 25 or data[24] != 8:
        raise ValueError("its header is cut, or has another depth than 8 bits")
    return int.from_bytes(data[20:24]), int.from_bytes(data[16:20])


def encode_mask(mask_HW: np.ndarray) -> bytes:
    """A mask as it is stored, as PNG. Equal masks give equal bytes."""
    _, encoded = cv2.imencode(".png", mask_HW, [cv2.IMWRITE_PNG_COMPRESSION, PNG_COMPRESSION_LEVEL])
    return encoded.tobytes()


def decode_stored_mask(png: bytes | memoryview, shape_HW: tuple[int, int]) -> np.ndarray:
    """A stored mask, uint8 (H, W). Raises IntegrityError for other bytes, and for another shape than its image's."""
    try:
        found_HW = _read_png_size(png)
        mask_HWC = _decode_png(png, (*found_HW, 1), None) if found_HW == shape_HW else None
    except (ValueError, cv2.error) as error:
        raise IntegrityError(f"a stored mask does not decode: {error}") from None
    if mask_HWC is None or mask_HWC.shape != (*shape_HW, 1):
        raise IntegrityError(f"a stored mask has the shape {found_HW}", f"expected that of its image, {shape_HW}")
    return mask_HWC[:, :, 0]


def _encode_raw(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    return image_HWC.tobytes()


def _decode_raw(data: bytes | memoryview, shape_HWC: tuple[int, ...], out_HWC: np.ndarray | None) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).reshape(shape_HWC)


def _copy_raw(encoded: Sequence[bytes | memoryview], images_NHWC: np.ndarray) -> None:
    if isinstance(encoded, Scattered) and _copy_slices is not None and len(encoded):
        _copy_slices(encoded.data, encoded.slots_N, encoded.starts_N, encoded.stops_N, images_NHWC)
        return
    num_bytes = images_NHWC[0].size
    if num_bytes >= _LARGE_BYTES:
        for data, image_HWC in zip(encoded, images_NHWC, strict=True):
            np.copyto(image_HWC, _decode_raw(data, image_HWC.shape, None))
        return
    pixels = images_NHWC.reshape(-1).data
    for place, data in enumerate(encoded):
        pixels[place * num_bytes : (place + 1) * num_bytes] = data


JPEG = StoredEncoding(_encode_jpeg, _decode_jpeg, _read_jpeg_size, bytes_per_value=0.15, is_lossless=False)
PNG = StoredEncoding(_encode_png, _decode_png, _read_png_size, bytes_per_value=0.6, is_lossless=True)
RAW = StoredEncoding(
    _encode_raw, _decode_raw, lambda data: None, bytes_per_value=1.0, is_lossless=True, copy_all=_copy_raw
)


_VP8_START_CODE = b"\x9d\x01\x2a"
_VP8L_SIGNATURE = 0x2F


def _encode_webp(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    # WebP knows no gray: libwebp stores colour planes that are constant, which cost next to nothing.
    conversion = cv2.COLOR_GRAY2BGR if image_HWC.shape[2] == 1 else cv2.COLOR_RGB2BGR
    stored = cv2.cvtColor(image_HWC, conversion)
    _, encoded = cv2.imencode(".webp", stored, [cv2.IMWRITE_WEBP_QUALITY, options.webp_quality])
    return encoded.tobytes()


def _decode_webp(data: bytes | memoryview, shape_HWC: tuple[int, ...], out_HWC: np.ndarray | None) -> np.ndarray:
    pixels_HWC = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels_HWC is None:
        raise ValueError("OpenCV could not decode it")
    if shape_HWC[2] == 1:
        # Green is the middle of three channels that rounding may set apart by a level.
        return np.ascontiguousarray(pixels_HWC[:, :, 1:2])
    return cv2.cvtColor(pixels_HWC, cv2.COLOR_BGR2RGB)


def _read_webp_size(data: bytes | memoryview) -> tuple[int, int]:
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


WEBP = StoredEncoding(_encode_webp, _decode_webp, _read_webp_size, bytes_per_value=0.1, is_lossless=False)
