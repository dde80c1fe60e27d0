"""Rewrites JPEGs that libjpeg warns about although all pixels are intact, without the cause of the warning, each with a
note.

So every kernel decodes them as strictly as any other file. docs/rejects.md lists all of libjpeg's warnings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardmill.images.jpeg_scans import Bits, Damaged, Frame, Scan
from shardmill.images.pixels import Complaint, Refused
from shardmill.values import RejectReason

TEM, EOI, SOS, APP0, APP14 = 0x01, 0xD9, 0xDA, 0xE0, 0xEE
RESTARTS = range(0xD0, 0xD8)
EXTRANEOUS_NOTE = "extraneous_bytes"
REVISION_NOTE = "jfif_revision"
SCAN_HEADER_NOTE = "scan_parameters"
TRANSFORM_NOTE = "adobe_transform"
# In entropy-coded data 0xFF is followed by 0.
MARKER = re.compile(rb"\xff[\x01-\xfe]")
YCC_TRANSFORM = 1
# What the header of a sequential scan says: all coefficients, with all of their bits.
ALL_COEFFICIENTS = b"\x00\x3f\x00"
# The walk over the bits of a larger file takes longer than decoding an image may.
MAX_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class Repaired:
    """A JPEG of the same pixels, without what libjpeg warned of."""

    data: bytes
    notes: tuple[str, ...]


def repair(data: bytes, complaint: Complaint) -> Repaired:
    """Raises `Refused` if bytes before a marker may as well be pixels that damage has left over."""
    if complaint.is_of_scans and len(data) > MAX_BYTES:
        raise Refused(complaint.reason, f"{complaint.detail}, in a file of more than {MAX_BYTES} bytes")
    try:
        return _Writer(data, looks_into_scans=complaint.is_of_scans).write()
    except (Damaged, IndexError, KeyError, ValueError) as error:
        raise Refused(RejectReason.CORRUPT_SCAN, f"{complaint.detail}, and {error}") from error


class _Writer:
    """One file: what is written of it, and how far it has been read."""

    def __init__(self, data: bytes, *, looks_into_scans: bool) -> None:
        self._data = data
        self._looks_into_scans = looks_into_scans
        self._position = 2
        self._frame = Frame()
        self._parts = [data[:2]]
        self._notes: dict[str, None] = {}

    def write(self) -> Repaired:
        while (marker := self._next_marker()) != EOI:
            if marker == TEM:
                continue
            if marker in RESTARTS:
                raise Damaged("a restart marker is outside of a scan")
            start = self._position
            self._position += int.from_bytes(self._data[start : start + 2])
            payload = self._data[start + 2 : self._position]
            self._frame.read_segment(marker, payload)
            payload = self._without_oddities(marker, payload)
            self._parts.append(bytes((0xFF, marker)) + (2 + len(payload)).to_bytes(2) + payload)
            if marker == SOS:
                self._write_scan(self._frame.read_scan(payload))
        if self._looks_into_scans and not self._frame.is_complete():
            raise Damaged("a scan is missing")
        self._parts += [b"\xff\xd9", self._data[self._position :]]
        return Repaired(b"".join(self._parts), tuple(self._notes))

    def _next_marker(self) -> int:
        """Goes behind it; bytes before it are dropped, as fill bytes are."""
        found = MARKER.search(self._data, self._position)
        if found is None:
            raise Damaged("there is no end marker")
        if self._data[self._position : found.start()].strip(b"\xff"):
            self._notes[EXTRANEOUS_NOTE] = None
        self._position = found.end()
        return self._data[found.end() - 1]

    def _without_oddities(self, marker: int, payload: bytes) -> bytes:
        if marker == APP0 and payload.startswith(b"JFIF\0") and payload[5:6] != b"\x01":
            self._notes[REVISION_NOTE] = None
            return payload[:5] + b"\x01\x01" + payload[7:]
        if marker == APP14 and payload.startswith(b"Adobe") and payload[11:12] > bytes((YCC_TRANSFORM,)):
            self._notes[TRANSFORM_NOTE] = None
            return payload[:11] + bytes((YCC_TRANSFORM,)) + payload[12:]
        if marker == SOS and not self._frame.is_progressive and payload[-3:] != ALL_COEFFICIENTS:
            self._notes[SCAN_HEADER_NOTE] = None
            return payload[:-3] + ALL_COEFFICIENTS
        return payload

    def _write_scan(self, scan: Scan) -> None:
        """Up to the marker behind the scan, segment by segment: each but the last has as many units as declared."""
        num_done = 0
        while True:
            found = MARKER.search(self._data, self._position)
            if found is None:
                raise Damaged("there is no end marker")
            is_last = self._data[found.end() - 1] not in RESTARTS
            segment = self._data[self._position : found.start()]
            if self._looks_into_scans:
                num_left = scan.num_units - num_done
                num_units = min(num_left, self._frame.restart_interval or num_left)
                segment = self._without_added_bytes(segment.rstrip(b"\xff"), scan, num_done, num_units)
                num_done += num_units
            self._parts.append(segment)
            self._position = found.start()
            if is_last:
                return
            self._parts.append(self._data[found.start() : found.end()])
            self._position = found.end()

    def _without_added_bytes(self, segment: bytes, scan: Scan, start: int, num_units: int) -> bytes:
        bits = Bits(segment)
        num_empty_blocks = scan.walk(bits, start, num_units)
        if bits.num_bits - bits.place < 8:
            return segment
        end = bits.place
        if num_empty_blocks or not bits.fills_up_with_ones():
            raise Damaged("the scan before them does not end as encoders end one")
        kept = bits.stuffed_before()
        if end == bits.place and bits.is_run(with_byte_before=True):
            raise Damaged("the scan ends within a run of the same byte")
        bits.place = end
        if scan.may_go_on(bits):
            raise Damaged("they may be more of that scan")
        self._notes[EXTRANEOUS_NOTE] = None
        return kept
