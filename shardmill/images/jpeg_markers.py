"""Walks over a JPEG's markers: rejects files before libjpeg sees them, and finds metadata.

It exists because libjpeg would start to allocate before we know the size, fills the missing part of a cut file with
grey, and does not tell trailing bytes.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from shardmill.images.pixels import Complaint, Refused, check_dimensions
from shardmill.kernel import shardmill_native
from shardmill.options import NormalizeOptions
from shardmill.values import RejectReason

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
