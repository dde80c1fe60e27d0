"""Rewrites JPEGs that libjpeg warns about although all pixels are intact, without the cause of the warning, each with a
note: so every kernel decodes them as strictly as any other file. docs/rejects.md lists all of libjpeg's warnings.

libjpeg warns in the same words of damage inside a scan, which makes the decoder lose or invent blocks, so that some of
the scan is left over, and of bytes that a camera or a tool added. Those come behind a scan that ends as encoders end
it: the last byte is filled up with ones, and what follows is not further blocks. So the end of the entropy-coded data
is found to the bit (about 1 MB/s: no coefficient is decoded).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

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


DHT, DRI = 0xC4, 0xDD
SEQUENTIAL_FRAMES, PROGRESSIVE_FRAME = (0xC0, 0xC1), 0xC2
ZERO_RUN = 15
NUM_COEFFICIENTS = 64
LONGEST_CODE = 16
NO_TABLE = [-1] * (1 << LONGEST_CODE)
# Read behind the end of a segment, before that is noticed; more than a block of the longest codes takes.
PADDING = bytes(1024)


class Damaged(Exception):
    """The entropy-coded data is not a whole scan, or not plainly one."""


class Bits:
    """A position in the bits of one segment of entropy-coded data."""

    __slots__ = ("_data", "num_bits", "place")

    def __init__(self, stuffed: bytes) -> None:
        data = stuffed.replace(b"\xff\0", b"\xff")
        self.num_bits = 8 * len(data)
        self._data = data + PADDING
        self.place = 0

    def symbol(self, table: list[int]) -> int:
        """The meaning of the next code. Raises `Damaged` if the table lacks it."""
        place = self.place
        byte = place >> 3
        entry = table[int.from_bytes(self._data[byte : byte + 3]) >> (8 - (place & 7)) & 0xFFFF]
        if entry < 0 or place > self.num_bits:
            raise Damaged("a code that no table has, or that is cut")
        self.place = place + (entry >> 8)
        return entry & 0xFF

    def take(self, num_bits: int) -> int:
        byte, shift = self.place >> 3, 32 - (self.place & 7) - num_bits
        self.place += num_bits
        return int.from_bytes(self._data[byte : byte + 4]) >> shift & (1 << num_bits) - 1

    def fills_up_with_ones(self) -> bool:
        """Goes to the next whole byte, over what encoders write there."""
        num_bits = -self.place % 8
        return self.take(num_bits) == (1 << num_bits) - 1

    def stuffed_before(self) -> bytes:
        return self._data[: self.place // 8].replace(b"\xff", b"\xff\0")

    def is_run(self, *, with_byte_before: bool = False) -> bool:
        """Whether the bytes that are left are one byte again and again."""
        rest = self._data[max(0, (self.place + 7) // 8 - with_byte_before) : self.num_bits // 8]
        return rest == rest[:1] * len(rest)


@dataclass(slots=True)
class Component:
    """One colour of the frame."""

    number_of_blocks: int
    """Number of blocks in a scan of only this component."""
    blocks_per_unit: int
    """Number of blocks per unit in a scan of several components."""
    is_set: bytearray
    """For a progressive frame: 1 for each coefficient that a scan has set."""
    bits_left: list[int] = field(default_factory=lambda: [1] * NUM_COEFFICIENTS)
    """Number of bits of each coefficient that later scans must provide; 1 before the first scan."""


@dataclass(frozen=True, slots=True)
class Scan:
    """One scan: the tables of each of its components, and the coefficients that it holds."""

    components: Sequence[Component]
    dc_tables: Sequence[list[int]]
    ac_tables: Sequence[list[int]]
    num_units: int
    is_progressive: bool
    first: int
    end: int
    is_refinement: bool

    def walk(self, bits: Bits, start: int, num_units: int) -> int:
        """Read the bits of the units from number `start` on; returns how many further units are declared empty.

        Raises `Damaged` if there are not as many.
        """
        num_empty_blocks = 0
        if not self.is_progressive:
            self._walk_sequential(bits, num_units)
        elif self.first == 0:
            self._walk_first_coefficients(bits, num_units)
        else:
            num_empty_blocks = self._walk_other_coefficients(bits, start, num_units)
        if bits.place > bits.num_bits:
            raise Damaged("the data ends before the scan does")
        return num_empty_blocks

    def _numbers(self) -> list[int]:
        """For each block of a unit: which component of the scan it is of."""
        if len(self.components) == 1:
            return [0]
        return [number for number, each in enumerate(self.components) for _ in range(each.blocks_per_unit)]

    def _walk_sequential(self, bits: Bits, num_units: int) -> None:
        tables = [(self.dc_tables[number], self.ac_tables[number]) for number in self._numbers()]
        for _ in range(num_units):
            for dc_table, ac_table in tables:
                size = bits.symbol(dc_table)
                bits.place += size
                place = 1
                while place < NUM_COEFFICIENTS:
                    symbol = bits.symbol(ac_table)
                    run, size = symbol >> 4, symbol & 15
                    if not size and run != ZERO_RUN:
                        break
                    bits.place += size
                    place += run + 1

    def _walk_first_coefficients(self, bits: Bits, num_units: int) -> None:
        tables = [self.dc_tables[number] for number in self._numbers()]
        if self.is_refinement:
            bits.place += len(tables) * num_units
            return
        for _ in range(num_units):
            for table in tables:
                size = bits.symbol(table)
                bits.place += size

    def _walk_other_coefficients(self, bits: Bits, start: int, num_blocks: int) -> int:
        table, is_set = self.ac_tables[0], self.components[0].is_set
        num_empty_blocks = 0
        for block in range(start, start + num_blocks):
            place, end = NUM_COEFFICIENTS * block + self.first, NUM_COEFFICIENTS * block + self.end
            while place < end and not num_empty_blocks:
                symbol = bits.symbol(table)
                run, size = symbol >> 4, symbol & 15
                if not size and run != ZERO_RUN:
                    num_empty_blocks = (1 << run) + bits.take(run)
                    break
                bits.place += size
                place = self._step(bits, is_set, place, end, run)
                if size and place < end:
                    is_set[place] = 1
                place += 1
            if num_empty_blocks:
                num_empty_blocks -= 1
                if self.is_refinement:
                    bits.place += sum(is_set[place:end])
        return num_empty_blocks

    def _step(self, bits: Bits, is_set: bytearray, place: int, end: int, run: int) -> int:
        """Over `run` coefficients without a value; a refinement has a bit for each other one on the way."""
        if not self.is_refinement:
            return place + run
        while place < end and (is_set[place] or run):
            if is_set[place]:
                bits.place += 1
            else:
                run -= 1
            place += 1
        return place

    def may_go_on(self, bits: Bits) -> bool:
        """Whether the bits that are left can be more units, up to an end like a scan's."""
        if self.is_refinement:
            # What its bits mean depends on blocks that nobody knows: anything but one byte again and again can be some.
            return not bits.is_run()
        try:
            while bits.num_bits - bits.place >= 8:
                self.walk(bits, self.num_units, 1)
        except Damaged:
            return False
        return bits.fills_up_with_ones()


@dataclass(slots=True)
class Frame:
    """The declarations of the segments read so far."""

    components: dict[int, Component] = field(default_factory=dict)
    is_progressive: bool = False
    num_units: int = 0
    tables: dict[int, list[int]] = field(default_factory=dict)
    """Tables by class and number, in one byte as in DHT."""
    restart_interval: int = 0

    def read_segment(self, marker: int, payload: bytes) -> None:
        if marker in SEQUENTIAL_FRAMES or marker == PROGRESSIVE_FRAME:
            self._read_frame(payload, is_progressive=marker == PROGRESSIVE_FRAME)
        elif marker == DHT:
            self._read_tables(payload)
        elif marker == DRI:
            self.restart_interval = int.from_bytes(payload[:2])

    def is_complete(self) -> bool:
        """Whether the scans read so far gave all bits of all coefficients."""
        return not any(any(each.bits_left) for each in self.components.values())

    def _read_frame(self, payload: bytes, *, is_progressive: bool) -> None:
        height, width = int.from_bytes(payload[1:3]), int.from_bytes(payload[3:5])
        factors = {payload[i]: (payload[i + 1] >> 4, payload[i + 1] & 15) for i in range(6, 6 + 3 * payload[5], 3)}
        if not all(across and down for across, down in factors.values()):
            raise Damaged("a component of the frame has no samples")
        unit_width = 8 * max(across for across, _ in factors.values())
        unit_height = 8 * max(down for _, down in factors.values())
        self.is_progressive = is_progressive
        self.num_units = -(-width // unit_width) * -(-height // unit_height)
        for name, (across, down) in factors.items():
            num_blocks = -(-width * across // unit_width) * -(-height * down // unit_height)
            # One block more than there are, for `may_go_on`.
            is_set = bytearray(NUM_COEFFICIENTS * (num_blocks + 1) if is_progressive else 0)
            self.components[name] = Component(num_blocks, across * down, is_set)

    def _read_tables(self, payload: bytes) -> None:
        while payload:
            counts = payload[1:17]
            end = 17 + sum(counts)
            self.tables[payload[0]] = make_table(counts, payload[17:end])
            payload = payload[end:]

    def read_scan(self, payload: bytes) -> Scan:
        selectors = [payload[i : i + 2] for i in range(1, 1 + 2 * payload[0], 2)]
        first, last, bits = payload[1 + 2 * payload[0] : 4 + 2 * payload[0]]
        components = [self.components[name] for name, _ in selectors]
        for each in components:
            each.bits_left[first : last + 1] = [bits & 15] * (last + 1 - first)
        return Scan(
            components=components,
            dc_tables=[self.tables.get(tables >> 4, NO_TABLE) for _, tables in selectors],
            ac_tables=[self.tables.get(0x10 | tables & 15, NO_TABLE) for _, tables in selectors],
            num_units=self.num_units if len(components) > 1 else components[0].number_of_blocks,
            is_progressive=self.is_progressive,
            first=first,
            end=last + 1,
            is_refinement=bits >> 4 > 0,
        )


def make_table(counts: bytes, symbols: bytes) -> list[int]:
    """For each 16-bit prefix, the code that it begins with: 256 times its length, plus its symbol; -1 if there
    is none.
    """
    table: list[int] = []
    remaining = iter(symbols)
    for length, count in enumerate(counts, start=1):
        for _, symbol in zip(range(count), remaining, strict=False):
            table += [length << 8 | symbol] * (1 << (LONGEST_CODE - length))
    return (table + NO_TABLE)[: 1 << LONGEST_CODE]
