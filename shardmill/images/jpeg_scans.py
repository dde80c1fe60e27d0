"""Finds the end of the entropy-coded data of a JPEG, to the bit, to distinguish added bytes after a scan from damage.

libjpeg warns of both in the same words. Damage inside a scan makes the decoder lose or invent blocks, and some of the
scan is left over. Bytes that a camera or a tool added come behind a scan that ends as encoders end it: the last byte is
filled up with ones, and what follows is not further blocks. Only files that libjpeg warns of are walked (about 1 MB/s:
no coefficient is decoded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
