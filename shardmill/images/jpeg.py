"""Decodes JPEG: a walk over the markers decides what is rejected, then libjpeg-turbo decodes with warnings as errors.

The walk exists because libjpeg would start to allocate before we know the size, fills the missing part of a cut file
with grey, and does not tell trailing bytes; simplejpeg's `strict=True` turns every libjpeg warning into an error. The
native kernel decodes directly to the downscaled pixels of the kept part, in one pass. It declines whatever it cannot do
as the wheels would, every file that libjpeg objects to among it; the wheels decide then. So rejections and notes never
depend on it. Shape legend: H height, W width, C channels.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg

from shardmill.images.exif import count_mpo_images, orient, read_orientation
from shardmill.images.icc import CONVERTED_NOTE, cmyk_to_srgb, conversion_of, to_srgb
from shardmill.images.jpeg_repair import repair
from shardmill.images.normalize import (
    LEAST_REDUCED_SIDE,
    Span,
    choose_reduction,
    kept_spans,
    reduced_length,
    resized_shape,
)
from shardmill.images.pixels import (
    FLIPS_COLUMNS,
    FLIPS_ROWS,
    SWAPS_SIDES,
    TRAILING_NOTE,
    Complaint,
    DecodedImage,
    Refused,
    check_dimensions,
    expect_size,
)
from shardmill.kernel import shardmill_native
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

if TYPE_CHECKING:
    from shardmill.images.icc import Conversion


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


# What the kernel's 16-bit weights are good for (native/area.h).
MOST_SHRINK = 64


@dataclass(frozen=True, slots=True)
class Shrink:
    """The kept part of the pixels as they are stored, upright or not, and the size that it shrinks to."""

    rows: Span
    columns: Span
    height: int
    width: int


def decode_shrunk(
    data: bytes,
    shape_HWC: tuple[int, int, int],
    scale: int,
    orientation: int,
    options: NormalizeOptions,
    conversion: Conversion | None,
) -> np.ndarray | None:
    """Return the pixels that `normalize` would compute, gray or RGB, not yet upright; None if the kernel declines.

    `shape_HWC` is what the file's header states; of it, a pixel of each `scale` x `scale` is decoded, and its colour
    converted by `conversion`.
    """
    height, width, channels = shape_HWC
    assert shardmill_native is not None, "who asked for the kernel native has found it"
    shrink = plan_shrink(reduced_length(height, scale), reduced_length(width, scale), orientation, options)
    tables = conversion.tables if conversion is not None else None
    if shrink is None or channels not in (1, 3) or (conversion is not None and tables is None):
        return None
    pixels_HWC = np.empty((shrink.height, shrink.width, channels), dtype=np.uint8)
    box = shrink.rows.start, shrink.columns.start, shrink.rows.length, shrink.columns.length
    colours = () if tables is None else (tables.linear, tables.matrix, tables.levels)
    is_done = shardmill_native.shrink_jpeg(data, pixels_HWC, (height, width), scale, box, *colours)
    return pixels_HWC if is_done else None


def plan_shrink(height: int, width: int, orientation: int, options: NormalizeOptions) -> Shrink | None:
    """Plan the downscaling of decoded pixels; None if no side shrinks, one grows or shrinks too far, or the result
    would look tiny.
    """
    is_turned = orientation in SWAPS_SIDES
    upright = (width, height) if is_turned else (height, width)
    rows, columns = kept_spans(*upright, options)
    shape = resized_shape(rows.length, columns.length, options)
    if shape == (rows.length, columns.length) or min(shape) < LEAST_REDUCED_SIDE:
        return None
    for length, stored in zip((rows.length, columns.length), shape, strict=True):
        if not stored <= length <= MOST_SHRINK * stored:
            return None
    if orientation in FLIPS_ROWS:
        rows = rows.mirrored(upright[0])
    if orientation in FLIPS_COLUMNS:
        columns = columns.mirrored(upright[1])
    return Shrink(columns, rows, shape[1], shape[0]) if is_turned else Shrink(rows, columns, *shape)


SOI, EOI, SOS, TEM = 0xD8, 0xD9, 0xDA, 0x01
RESTARTS = range(0xD0, 0xD8)
APP0, APP14 = 0xE0, 0xEE
# Quantization, Huffman codes, restart interval: nothing in them is asked for here.
TABLES = frozenset({0xDB, 0xC4, 0xDD})
WITH_LENGTH = frozenset(range(0xC0, 0xFF)) - {*RESTARTS, SOI, EOI}
SEGMENT_HEAD = struct.Struct(">BBH")
APP_OR_COMMENT = frozenset({*range(0xE0, 0xF0), 0xFE})
START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
DECODABLE_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
FRAME_NAMES = {0xC3: "lossless", 0xC5: "hierarchical", 0xC6: "hierarchical", 0xC7: "hierarchical lossless"}
JPEG_LS_FRAME = 0xF7
# Each scan of a progressive file visits every block: without a limit, a small file could keep a core busy for hours.
MAX_SCANS = 100
# In entropy-coded data 0xFF is followed by 0 (stuffing) or a restart marker; anything else ends the scan.
EOI_OR_SOS = re.compile(rb"\xff[\xd9\xda]")
# One 0xFF and no more: `\xff+` would walk a run of them again from each of its bytes.
END_OF_SCAN = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
LATER_METADATA = re.compile(rb"\xff[\xe0-\xef\xfe]")
NO_FILL_BYTE = re.compile(rb"[^\xff]")
# Honest files hold some dozens of segments, a few hundred with large profiles.
MAX_SEGMENTS = 10_000


@dataclass(slots=True)
class JpegHeader:
    """The declarations of the markers before the first scan."""

    height: int = 0
    width: int = 0
    num_components: int = 0
    has_adobe: bool = False
    exif: bytes | None = None
    icc_parts: dict[int, bytes] = field(default_factory=dict)
    """Parts of the ICC profile by number: a segment has at most 64 kB, and a profile may need several."""
    num_icc_parts: int = 0
    mpf: bytes | None = None
    sos_start: int = 0
    scan_start: int = 0
    """The first byte of entropy-coded data, right behind the segment SOS."""
    has_frame: bool = False

    def add_icc_part(self, part: bytes) -> None:
        """A part begins with its number and the number of all."""
        number, self.num_icc_parts = part[:1].ljust(1, b"\0")[0], part[1:2].ljust(1, b"\0")[0]
        self.icc_parts.setdefault(number, part[2:])

    def icc(self) -> bytes | None:
        """The colour profile, None without one; empty, so that it is ignored with a note, if parts are missing."""
        if not self.icc_parts:
            return None
        is_whole = len(self.icc_parts) == self.num_icc_parts
        return b"".join(part for _, part in sorted(self.icc_parts.items())) if is_whole else b""


def read_header(data: bytes, options: NormalizeOptions) -> JpegHeader:
    """Walks the markers up to the first scan and refuses by what they declare, before anything is allocated."""
    header = JpegHeader()
    found = _find_segments(data, MAX_SEGMENTS) if _find_segments is not None else None
    for marker, start, end in segments(data) if found is None else found:
        if marker == SOS:
            header.sos_start, header.scan_start = start - 4, end
        elif marker not in TABLES:
            _read_segment(header, marker, data[start:end], options)
    if not header.has_frame:
        raise Refused(RejectReason.BAD_HEADER, "a scan comes before the frame header")
    return header


def strip_metadata(data: bytes, header: JpegHeader, end: int) -> bytes:
    """The JPEG without the metadata before its first scan, and without what lies behind `end`: equal pixels."""
    bare = [_without_metadata(marker, data[start:end]) for marker, start, end in segments(data) if marker != SOS]
    return b"\xff\xd8" + b"".join(bare) + data[header.sos_start : end]


def has_later_metadata(bare: bytes, header: JpegHeader, end: int) -> bool:
    """Whether what `strip_metadata` left may hold a comment between two scans; bytes of a table can look like one."""
    return LATER_METADATA.search(bare, len(bare) - (end - header.sos_start)) is not None


def _without_metadata(marker: int, payload: bytes) -> bytes:
    if marker == APP0 and payload.startswith(b"JFIF\0"):
        payload = payload[:12].ljust(12, b"\0") + b"\0\0"  # its thumbnail is of 0 x 0 pixels
    elif marker == APP14 and payload.startswith(b"Adobe"):
        payload = payload[:12]  # it says whether colours are YCC, or inks inverted
    elif marker == TEM or marker in APP_OR_COMMENT:
        return b""
    return bytes((0xFF, marker)) + (2 + len(payload)).to_bytes(2) + payload


def find_end(data: bytes, scan_start: int) -> int:
    """The position after the end marker of this image; refuses a file without one as truncated."""
    num_scans, place = 1, _find_scan_or_end(data, scan_start)
    while place >= 0 and data[place + 1] != EOI:
        num_scans += 1
        _check_num_scans(num_scans)
        place = _find_scan_or_end(data, place + 2)
    if place < 0:
        raise Refused(RejectReason.TRUNCATED, f"no end marker in {len(data)} bytes")
    # Nearly every file ends right here. If not, these two bytes may belong to a table between two scans.
    return len(data) if place + 2 == len(data) else _walk_scans(data, scan_start)


def search_scan_or_end(data: bytes, start: int) -> int:
    """The place of the next marker from `start` on that begins a scan or ends the image; -1 if there is none."""
    found = EOI_OR_SOS.search(data, start)
    return found.start() if found else -1


# The kernel's takes a quarter of the time.
_find_scan_or_end = getattr(shardmill_native, "find_scan_or_end", search_scan_or_end)
# Of plain segments alone, and without those in TABLES; what it does not understand is for `segments`.
_find_segments = getattr(shardmill_native, "find_segments", None)


def _walk_scans(data: bytes, scan_start: int) -> int:
    position, num_scans = scan_start, 1
    for _ in range(MAX_SEGMENTS):
        found = END_OF_SCAN.search(data, position)
        if found is None:  # damage made a marker that swallowed the real end; libjpeg will report what is wrong
            return len(data)
        marker = data[found.end() - 1]
        if marker == EOI:
            return found.end()
        num_scans += marker == SOS
        _check_num_scans(num_scans)
        length = int.from_bytes(data[found.end() : found.end() + 2])
        position = found.end() + max(2, length)
    raise Refused(RejectReason.BAD_HEADER, f"more than {MAX_SEGMENTS} segments between scans")


def _check_num_scans(num_scans: int) -> None:
    if num_scans > MAX_SCANS:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format=jpeg with more than {MAX_SCANS} scans")


def segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, end) of each segment's payload, up to the first scan's header; refuses what is none.

    For a small image this walk is a good part of all work: what nearly every segment looks like is judged at once.
    """
    position, num_bytes, unpack = 2, len(data), SEGMENT_HEAD.unpack_from
    for _ in range(MAX_SEGMENTS):
        start = position + 4
        if start <= num_bytes:
            first, marker, length = unpack(data, position)
            end = position + 2 + length
            is_plain = first == 0xFF and marker in WITH_LENGTH and start <= end <= num_bytes
        else:
            is_plain = False
        if not is_plain:
            marker, start, end = _judge_segment(data, position)
        yield marker, start, end
        if marker == SOS:
            return
        position = end
    raise Refused(RejectReason.BAD_HEADER, f"more than {MAX_SEGMENTS} segments before the first scan")


def _judge_segment(data: bytes, position: int) -> tuple[int, int, int]:
    """Every marker before the first scan but TEM has a length."""
    if position < len(data) and data[position] != 0xFF:
        raise _complain_of_gap(data, position)
    marker_code = NO_FILL_BYTE.search(data, position)  # any number of fill bytes may stand before it
    position = marker_code.start() if marker_code else len(data)
    if position + 3 > len(data):
        raise Refused(RejectReason.TRUNCATED, f"the header ends at byte {len(data)}")
    marker = data[position]
    if marker == TEM:
        return marker, position + 1, position + 1
    if marker in (0, SOI, EOI) or marker in RESTARTS:
        raise Refused(RejectReason.BAD_HEADER, f"marker 0x{marker:02x} at byte {position} before the first scan")
    length = int.from_bytes(data[position + 1 : position + 3])
    if length < 2:
        raise Refused(RejectReason.BAD_HEADER, f"segment of length {length} at byte {position}")
    end = position + 1 + length
    if end > len(data):
        raise Refused(RejectReason.TRUNCATED, f"a header segment ends at byte {end} of {len(data)}")
    return marker, position + 3, end


def _complain_of_gap(data: bytes, position: int) -> Refused:
    """Of bytes between two segments; they are no segments of a length that was altered, if they hold no 0xFF."""
    end = data.find(b"\xff", position)
    if end < 0 or END_OF_SCAN.match(data, end) is None:
        return Refused(RejectReason.BAD_HEADER, f"no marker at byte {position}")
    return Complaint(f"{end - position} extraneous bytes at byte {position}")


def _read_segment(header: JpegHeader, marker: int, payload: bytes, options: NormalizeOptions) -> None:
    if marker in START_OF_FRAME or marker == JPEG_LS_FRAME:
        _read_frame(header, marker, payload, options)
    elif marker == 0xE1 and payload.startswith(b"Exif\0") and header.exif is None:
        header.exif = payload[6:]
    elif marker == 0xE2 and payload.startswith(b"ICC_PROFILE\0"):
        header.add_icc_part(payload[12:])
    elif marker == 0xE2 and payload.startswith(b"MPF\0"):
        header.mpf = payload[4:]
    elif marker == APP14 and payload.startswith(b"Adobe"):
        header.has_adobe = True


def _read_frame(header: JpegHeader, marker: int, payload: bytes, options: NormalizeOptions) -> None:
    if marker not in DECODABLE_FRAMES:
        name = "JPEG-LS" if marker == JPEG_LS_FRAME else FRAME_NAMES.get(marker, "arithmetic-coded")
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format={name} jpeg (frame marker 0x{marker:02x})")
    if header.has_frame:
        raise Refused(RejectReason.BAD_HEADER, "two frame headers")
    if len(payload) < 6:
        raise Refused(RejectReason.BAD_HEADER, f"frame header of {len(payload)} bytes")
    header.has_frame = True
    bits_per_sample = payload[0]
    header.height = int.from_bytes(payload[1:3])
    header.width = int.from_bytes(payload[3:5])
    header.num_components = payload[5]
    if bits_per_sample != 8:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, f"format=jpeg with {bits_per_sample} bits per sample")
    if header.height == 0 and header.width > 0:
        raise Refused(RejectReason.UNSUPPORTED_FORMAT, "format=jpeg with its height in a DNL marker")
    check_dimensions(header.height, header.width, options)
    if header.num_components not in (1, 3, 4):
        raise Refused(RejectReason.UNSUPPORTED_MODE, f"jpeg with {header.num_components} components")
