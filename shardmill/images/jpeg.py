"""Decodes JPEG: a walk over the markers decides what is rejected, then libjpeg-turbo decodes with warnings as errors.

simplejpeg's `strict=True` turns every libjpeg warning into an error.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import simplejpeg

from shardmill.images.exif import count_mpo_images, orient, read_orientation
from shardmill.images.geometry import choose_reduction, kept_spans, reduced_length
from shardmill.images.icc import CONVERTED_NOTE, cmyk_to_srgb, conversion_of, to_srgb
from shardmill.images.jpeg_markers import JpegHeader, find_end, has_later_metadata, read_header, strip_metadata
from shardmill.images.jpeg_native import decode_shrunk
from shardmill.images.jpeg_repair import repair
from shardmill.images.pixels import SWAPS_SIDES, TRAILING_NOTE, Complaint, DecodedImage, Refused, expect_size
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

# libjpeg's warnings that damage may explain, or something harmless; the first needs a guess at four inks.
HARMLESS_WARNINGS = ("Warning: unknown JFIF revision", "Invalid SOS parameters for sequential JPEG")
UNKNOWN_TRANSFORM = "Unknown Adobe color transform"
EXTRANEOUS_BYTES = re.compile("Corrupt JPEG data: [0-9]+ extraneous bytes before marker")
# A repair shows what else libjpeg warns of; a file has one oddity, or two.
MAX_REPAIRS = 4
# libjpeg's warnings about the pixel data, by how their text begins; what is left are errors in tables and headers.
SCAN_WARNINGS = ("Corrupt JPEG data", "Inconsistent progression")


def decode_jpeg(data: bytes, options: NormalizeOptions) -> DecodedImage:
    notes: tuple[str, ...] = ()
    for _ in range(MAX_REPAIRS):
        try:
            decoded = _decode_intact(data, options)
        except Complaint as complaint:
            repaired = repair(data, complaint)
            data, notes = repaired.data, notes + repaired.notes
        else:
            return replace(decoded, notes=(*dict.fromkeys(notes), *decoded.notes)) if notes else decoded
    return _decode_intact(data, options)


def _decode_intact(data: bytes, options: NormalizeOptions) -> DecodedImage:
    """Raises `Complaint` if libjpeg warns of what may be harmless."""
    header = read_header(data, options)
    notes: list[str] = []
    end = find_end(data, header.scan_start)
    num_images = count_mpo_images(header.mpf) if header.mpf else 1
    if num_images > 1:
        notes.append(f"first_frame_of_{num_images}")
    elif end < len(data):
        notes.append(TRAILING_NOTE)

    profile = header.icc()
    if profile == b"" or options.keep_bytes:
        # libjpeg warns of a profile whose parts do not make a whole. That is no damage to the image.
        data = strip_metadata(data, header, end)
    scale = choose_reduction(header.height, header.width, options)
    orientation = read_orientation(header.exif)
    shrunk_HWC = None
    shape_HWC = header.height, header.width, header.num_components
    has_stored_shape = shape_HWC == options.one_shape_HWC
    conversion = conversion_of(profile, header.num_components)
    if options.kernel == "native" and not has_stored_shape:
        shrunk_HWC = decode_shrunk(data, shape_HWC, scale, orientation, options, conversion)
    pixels_HWC = _decode_reduced(data, header, scale) if shrunk_HWC is None else shrunk_HWC
    turned: list[str] = []
    pixels_HWC = orient(pixels_HWC, orientation, turned)
    if conversion is not None and shrunk_HWC is None:
        # LittleCMS takes nearly as long as decoding: only what will be kept.
        rows, columns = kept_spans(pixels_HWC.shape[0], pixels_HWC.shape[1], options)
        pixels_HWC = pixels_HWC[rows.start : rows.end, columns.start : columns.end]
    if header.num_components == 4:
        # Adobe's writers, and others that copy their marker, store 255 for "no ink"; without the marker 0 is.
        pixels_HWC = cmyk_to_srgb(pixels_HWC, profile, notes, stored_inverted=header.has_adobe)
    elif conversion is not None and shrunk_HWC is not None:
        notes.append(CONVERTED_NOTE)
    else:
        pixels_HWC = to_srgb(pixels_HWC, profile, notes)
    notes += turned
    is_whole = shrunk_HWC is None and header.num_components < 4
    is_bare = options.keep_bytes and is_whole and not has_later_metadata(data, header, end)
    return DecodedImage(
        pixels_HWC=pixels_HWC,
        notes=tuple(notes),
        bare_file=data if is_bare else None,
        whole_shape_HW=(header.width, header.height) if orientation in SWAPS_SIDES else (header.height, header.width),
        orientation=orientation,
    )


def _decode_reduced(data: bytes, header: JpegHeader, scale: int) -> np.ndarray:
    """A pixel of each `scale` x `scale`. All of the entropy-coded data is checked nevertheless."""
    colorspace = {1: "GRAY", 3: "RGB", 4: "CMYK"}[header.num_components]
    height, width = reduced_length(header.height, scale), reduced_length(header.width, scale)
    try:
        pixels_HWC = _decode_strictly(data, colorspace, height, width)
    except Complaint as complaint:
        # Of four inks it makes CMYK or YCCK: one of them is wrong.
        if header.num_components == 4 and UNKNOWN_TRANSFORM in complaint.detail:
            raise Refused(complaint.reason, complaint.detail) from complaint
        raise
    expect_size(pixels_HWC, height, width)
    return pixels_HWC


def _decode_strictly(data: bytes, colorspace: str, least_height: int, least_width: int) -> np.ndarray:
    """At the smallest scale of libjpeg that gives as many pixels."""
    try:
        return simplejpeg.decode_jpeg(
            data, colorspace, min_height=least_height, min_width=least_width, min_factor=1, strict=True
        )
    except ValueError as error:
        detail = f"libjpeg: {error}"
        if "Insufficient memory" in detail:
            raise MemoryError(detail) from error
        if detail.startswith("libjpeg: Premature end of JPEG file"):
            raise Refused(RejectReason.TRUNCATED, detail) from error
        if str(error).startswith((*HARMLESS_WARNINGS, UNKNOWN_TRANSFORM)):
            raise Complaint(detail) from error
        if EXTRANEOUS_BYTES.match(str(error)):
            raise Complaint(detail, is_of_scans=True) from error
        if str(error).startswith(SCAN_WARNINGS):
            raise Refused(RejectReason.CORRUPT_SCAN, detail) from error
        if "subsampling" in detail:
            raise Refused(RejectReason.UNSUPPORTED_MODE, detail) from error
        raise Refused(RejectReason.BAD_HEADER, detail) from error
