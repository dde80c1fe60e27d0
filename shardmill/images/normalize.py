"""Upright pixels to the one size and colour of the dataset, and that image to its stored encoding and back.

The geometry is part of the contract: the centre square is cut out first and resized then. Only kernels that give the
same integers on every CPU are used: OpenCV's AREA to shrink and LINEAR_EXACT to enlarge (its cubic kernel gave five
results on five instruction sets). Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np
import simplejpeg

from shardmill.errors import IntegrityError
from shardmill.images.decode import DECODER_ID
from shardmill.images.pixels import prepare_opencv
from shardmill.options import NormalizeOptions

# Low effort: higher levels gain a few percent on photos and take several times as long.
PNG_COMPRESSION_LEVEL = 3
# ITU-R BT.601 luma in units of 2^-16; the three add up to 2^16.
LUMA_WEIGHTS_RGB = np.array([19595, 38470, 7471], dtype=np.uint32)


def normalization_fingerprint(options: NormalizeOptions) -> str:
    """SHA-256 over the options and `DECODER_ID`: equal fingerprints promise equal stored bytes for equal sources."""
    content = {"options": options.model_dump(mode="json"), "decoder_id": DECODER_ID}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def normalize(pixels_HWC: np.ndarray, options: NormalizeOptions) -> np.ndarray:
    """A fresh uint8 array of `options.image_shape_HWC` from gray or RGB pixels of any size."""
    prepare_opencv()
    if options.resize_mode == "crop":
        image_HWC = _resize(_crop_square(pixels_HWC), options.image_size, options.image_size)
    else:
        image_HWC = _fit_in_square(pixels_HWC, options.image_size)
    return _to_channels(image_HWC, options.num_channels)


def _crop_square(pixels_HWC: np.ndarray) -> np.ndarray:
    height, width = pixels_HWC.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels_HWC[top : top + side, left : left + side]


def _fit_in_square(pixels_HWC: np.ndarray, size: int) -> np.ndarray:
    height, width, num_channels = pixels_HWC.shape
    longer = max(height, width)
    fitted_height = max(1, (height * size + longer // 2) // longer)
    fitted_width = max(1, (width * size + longer // 2) // longer)
    padded_HWC = np.zeros((size, size, num_channels), dtype=np.uint8)
    top, left = (size - fitted_height) // 2, (size - fitted_width) // 2
    padded_HWC[top : top + fitted_height, left : left + fitted_width] = _resize(pixels_HWC, fitted_height, fitted_width)
    return padded_HWC


def _resize(pixels_HWC: np.ndarray, height: int, width: int) -> np.ndarray:
    contiguous_HWC = np.ascontiguousarray(pixels_HWC)  # upright pixels may be a flipped view
    if contiguous_HWC.shape[:2] == (height, width):
        return contiguous_HWC
    shrinks = height <= contiguous_HWC.shape[0] and width <= contiguous_HWC.shape[1]
    kernel = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR_EXACT
    resized = cv2.resize(contiguous_HWC, (width, height), interpolation=kernel)
    return resized.reshape(height, width, -1)  # OpenCV drops the axis of a single channel


def _to_channels(image_HWC: np.ndarray, num_channels: int) -> np.ndarray:
    if image_HWC.shape[2] == num_channels:
        return image_HWC.copy() if not image_HWC.flags.owndata else image_HWC
    if num_channels == 3:
        return np.repeat(image_HWC, 3, axis=2)
    luma_HW = (image_HWC.astype(np.uint32) @ LUMA_WEIGHTS_RGB + (1 << 15)) >> 16
    return luma_HW.astype(np.uint8)[:, :, np.newaxis]


@dataclass(frozen=True, slots=True)
class StoredEncoding:
    """How one of the stored encodings is written and read."""

    encode: Callable[[np.ndarray, NormalizeOptions], bytes]
    decode: Callable[[bytes | memoryview, tuple[int, int, int]], np.ndarray]
    read_size: Callable[[bytes | memoryview], tuple[int, int] | None]
    """Height and width that the header declares; None for an encoding without a header."""


def encode_image(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    """The bytes that a shard stores for a normalized image."""
    return STORED_ENCODINGS[options.encoding].encode(np.ascontiguousarray(image_HWC), options)


def decode_stored(data: bytes | memoryview, encoding: str, shape_HWC: tuple[int, int, int]) -> np.ndarray:
    """What `encode_image` wrote, as uint8 pixels of `shape_HWC` (read-only for `raw`); the reader's hot path."""
    stored = STORED_ENCODINGS[encoding]
    try:
        # By its header first: a bomb in a shard must not be unpacked to be found out.
        declared_HW = stored.read_size(data)
        if declared_HW is not None and declared_HW != shape_HWC[:2]:
            raise IntegrityError(f"a stored {encoding} image declares {declared_HW}", f"expected {shape_HWC[:2]}")
        image_HWC = stored.decode(data, shape_HWC)
    except (ValueError, cv2.error) as error:
        raise IntegrityError(f"a stored {encoding} image does not decode: {error}") from error
    if image_HWC.shape != shape_HWC or image_HWC.dtype != np.uint8:
        found = f"{image_HWC.dtype} of shape {image_HWC.shape}"
        raise IntegrityError(f"a stored {encoding} image has {found}", f"expected uint8 of shape {shape_HWC}")
    return image_HWC


def _encode_jpeg(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    is_gray = image_HWC.shape[2] == 1
    return simplejpeg.encode_jpeg(
        image_HWC,
        quality=options.jpeg_quality,
        colorspace="GRAY" if is_gray else "RGB",
        colorsubsampling="Gray" if is_gray else "444",
    )


def _decode_jpeg(data: bytes | memoryview, shape_HWC: tuple[int, int, int]) -> np.ndarray:
    return simplejpeg.decode_jpeg(data, "GRAY" if shape_HWC[2] == 1 else "RGB")


def _read_jpeg_size(data: bytes | memoryview) -> tuple[int, int]:
    if data[:2] != b"\xff\xd8":
        raise ValueError("it does not begin like a JPEG")
    height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    return int(height), int(width)


def _encode_png(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    stored = image_HWC if image_HWC.shape[2] == 1 else cv2.cvtColor(image_HWC, cv2.COLOR_RGB2BGR)
    _, encoded = cv2.imencode(".png", stored, [cv2.IMWRITE_PNG_COMPRESSION, PNG_COMPRESSION_LEVEL])
    return encoded.tobytes()


def _decode_png(data: bytes | memoryview, shape_HWC: tuple[int, int, int]) -> np.ndarray:
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


def _encode_raw(image_HWC: np.ndarray, options: NormalizeOptions) -> bytes:
    return image_HWC.tobytes()


def _decode_raw(data: bytes | memoryview, shape_HWC: tuple[int, int, int]) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8).reshape(shape_HWC)


STORED_ENCODINGS = {
    "jpeg": StoredEncoding(encode=_encode_jpeg, decode=_decode_jpeg, read_size=_read_jpeg_size),
    "png": StoredEncoding(encode=_encode_png, decode=_decode_png, read_size=_read_png_size),
    "raw": StoredEncoding(encode=_encode_raw, decode=_decode_raw, read_size=lambda data: None),
}
