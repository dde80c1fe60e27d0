"""Converts one source image to one sample or one rejection: the pure function at the heart of the ETL and of `predict`.

It needs no Spark and touches no file:

    process_image(SourceImage(key="cat.jpg", size_bytes=len(data)), data, NormalizeOptions())
"""

from __future__ import annotations

import hashlib

import cv2
import numpy as np

from shardmill.formats.encodings import encode_image
from shardmill.images.decode import decode_image
from shardmill.images.exif import ROTATED_NOTE
from shardmill.images.extensions import has_other_extension
from shardmill.images.icc import CONVERTED_NOTE
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.images.normalize import normalize
from shardmill.images.pixels import MAX_DETAIL_CHARACTERS, DecodedImage, Refused, prepare_opencv, refusal_of
from shardmill.kernel import shardmill_native
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from shardmill.words import printable

# Sources with a shorter side than this are accepted; the note lets one find them.
TINY_SIDE_PIXELS = 8


def process_image(source: SourceImage, data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
    """Decodes, normalizes and encodes one image. Equal arguments give an equal answer; no bytes make it raise.

    Only `MemoryError` passes through: it concerns the machine, not the image.
    """
    source_sha256 = hashlib.sha256(data).hexdigest()
    try:
        return _process(source, data, source_sha256, options)
    except Exception as error:
        refused = refusal_of(error, RejectReason.DECODER_ERROR)
    # Parts of the detail come from the file.
    return source.rejected(refused.reason, printable(refused.detail)[:MAX_DETAIL_CHARACTERS], "decode", source_sha256)


def _process(source: SourceImage, data: bytes, source_sha256: str, options: NormalizeOptions) -> ImageSample:
    if len(data) > options.max_source_bytes:
        raise Refused(
            RejectReason.TOO_LARGE_BYTES, f"{len(data)} bytes; max_source_bytes is {options.max_source_bytes}"
        )
    # An empty file is one whatever was asked for.
    if 0 < len(data) < options.min_source_bytes:
        raise Refused(RejectReason.TOO_SMALL, f"{len(data)} bytes; min_source_bytes is {options.min_source_bytes}")
    format_name, decoded = decode_image(data, options)
    image_HWC = normalize(decoded.pixels_HWC, options)
    sums, square_sums = channel_sums(image_HWC)
    luma_HW = luma(image_HWC)
    notes = list(decoded.notes)
    if has_other_extension(source.key, format_name):
        notes.append("extension_mismatch")
    if min(decoded.pixels_HWC.shape[:2]) < TINY_SIDE_PIXELS:
        notes.append("tiny")
    num_pixels = image_HWC.shape[0] * image_HWC.shape[1]
    # n * sum(x^2) == sum(x)^2 holds for a constant channel and for no other.
    if all(num_pixels * squares == total**2 for total, squares in zip(sums, square_sums, strict=True)):
        notes.append("constant")
    source_height, source_width = decoded.whole_shape_HW or decoded.pixels_HWC.shape[:2]
    return ImageSample(
        image=_bytes_to_keep(format_name, decoded, image_HWC, options) or encode_image(image_HWC, options),
        height=image_HWC.shape[0],
        width=image_HWC.shape[1],
        channels=image_HWC.shape[2],
        source_sha256=source_sha256,
        channel_sums=sums,
        channel_square_sums=square_sums,
        notes=tuple(notes),
        source_height=source_height,
        source_width=source_width,
        source_bytes=len(data),
        laplacian_square_sum=laplacian_square_sum(luma_HW),
        difference_hash=difference_hash(luma_HW),
        orientation=decoded.orientation,
    )


def _bytes_to_keep(
    format_name: str, decoded: DecodedImage, image_HWC: np.ndarray, options: NormalizeOptions
) -> bytes | None:
    """The source's own file without metadata, if it decodes to exactly the normalized pixels."""
    is_other = {ROTATED_NOTE, CONVERTED_NOTE} & set(decoded.notes)
    if format_name != options.encoding or is_other or decoded.pixels_HWC.shape != image_HWC.shape:
        return None
    return decoded.bare_file


def channel_sums(image_HWC: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of the values, and of their squares: the same exact integers in any order of addition."""
    if shardmill_native is not None:
        return shardmill_native.channel_sums(np.ascontiguousarray(image_HWC))
    prepare_opencv()
    # OpenCV adds integers up exactly (doubles hold them up to 2^53), much faster than NumPy; one channel best of all.
    planes = cv2.split(image_HWC)
    sums = tuple(int(cv2.sumElems(plane_HW)[0]) for plane_HW in planes)
    return sums, tuple(int(cv2.norm(plane_HW, cv2.NORM_L2SQR)) for plane_HW in planes)
