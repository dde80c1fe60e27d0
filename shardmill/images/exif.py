"""Reads the few TIFF-style tags that change pixels: the orientation of EXIF, and the image count of MPO."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.images.pixels import apply_orientation

ORIENTATION_TAG = 0x0112
MPO_IMAGE_COUNT_TAG = 0xB001
TYPE_SIZES_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
# An honest directory holds some dozens of entries, and no tag that we read has more values than an image has strips.
MAX_ENTRIES = 4096
MAX_VALUES = 1 << 18

ROTATED_NOTE = "exif_rotated"
IGNORED_NOTE = "exif_ignored"


class BadDirectory(ValueError):
    """A directory that points outside its own bytes or holds what no writer writes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tag of an image file directory."""

    tag: int
    type: int
    count: int
    value_start: int
    """Start of the value: in the entry itself, or at the offset that it holds."""


@dataclass(frozen=True, slots=True)
class Directory:
    """One image file directory of some TIFF-style bytes."""

    data: bytes
    byte_order: str
    """`<` or `>`, as `struct` writes it."""
    entries: dict[int, Entry]
    next_start: int

    def integers(self, tag: int) -> tuple[int, ...]:
        """The values of a SHORT, LONG or IFD tag, empty if it is absent."""
        entry = self.entries.get(tag)
        if entry is not None and entry.count > MAX_VALUES:
            raise BadDirectory(f"tag {tag} has {entry.count} values")
        return self._unpack(tag, MAX_VALUES)

    def integer(self, tag: int, default: int) -> int:
        """The first value alone, however many the tag declares."""
        values = self._unpack(tag, 1)
        return values[0] if values else default

    def small_integer(self, tag: int) -> int:
        """The first value of a tag that may have another type too; 0 then, and if it is absent."""
        try:
            return self.integer(tag, default=0)
        except BadDirectory:
            return 0

    def raw(self, tag: int) -> bytes | None:
        """The value's bytes as they lie in the file, None if the tag is absent."""
        entry = self.entries.get(tag)
        if entry is None:
            return None
        return self.data[entry.value_start : entry.value_start + entry.count * TYPE_SIZES_BYTES.get(entry.type, 1)]

    def _unpack(self, tag: int, at_most: int) -> tuple[int, ...]:
        entry = self.entries.get(tag)
        if entry is None:
            return ()
        if entry.type not in (3, 4, 13):
            raise BadDirectory(f"tag {tag} has type {entry.type}")
        code = "H" if entry.type == 3 else "I"
        return struct.unpack_from(f"{self.byte_order}{min(entry.count, at_most)}{code}", self.data, entry.value_start)


def read_directory(data: bytes) -> Directory:
    """The first directory. Every value is known to lie inside `data` afterwards."""
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None or len(data) < 8 or struct.unpack_from(order + "H", data, 2)[0] != 42:
        raise BadDirectory("no TIFF header")
    return directory_at(data, order, struct.unpack_from(order + "I", data, 4)[0])


def directory_at(data: bytes, order: str, start: int) -> Directory:
    """The directory at `start`, in bytes whose header was read."""
    num_entries = _count_entries(data, order, start)
    if num_entries > MAX_ENTRIES:
        raise BadDirectory(f"directory of {num_entries} entries at byte {start}")
    entries = {entry.tag: entry for entry in _read_entries(data, order, start + 2, num_entries)}
    return Directory(data=data, byte_order=order, entries=entries, next_start=next_directory(data, order, start))


def next_directory(data: bytes, order: str, start: int) -> int:
    """Return the offset of the directory after the one at `start`, 0 if there is none; reads no entry, so a chain is
    cheap.
    """
    end = start + 2 + 12 * _count_entries(data, order, start)
    # EXIF writers often leave out the pointer to a next directory.
    return struct.unpack_from(order + "I", data, end)[0] if end + 4 <= len(data) else 0


def _count_entries(data: bytes, order: str, start: int) -> int:
    if start < 8 or start + 2 > len(data):
        raise BadDirectory(f"directory at byte {start} of {len(data)}")
    num_entries: int = struct.unpack_from(order + "H", data, start)[0]
    if start + 2 + 12 * num_entries > len(data):
        raise BadDirectory(f"directory of {num_entries} entries at byte {start} of {len(data)}")
    return num_entries


def _read_entries(data: bytes, order: str, start: int, num_entries: int) -> Iterator[Entry]:
    for position in range(start, start + 12 * num_entries, 12):
        tag, type_, count = struct.unpack_from(order + "HHI", data, position)
        num_bytes = count * TYPE_SIZES_BYTES.get(type_, 1)
        value_start = position + 8 if num_bytes <= 4 else struct.unpack_from(order + "I", data, position + 8)[0]
        if value_start + num_bytes <= len(data):  # others are as if absent: camera makers write odd private tags
            yield Entry(tag=tag, type=type_, count=count, value_start=value_start)
        elif tag == ORIENTATION_TAG:
            raise BadDirectory("the orientation lies outside the EXIF bytes")


def read_orientation(exif: bytes | None) -> int:
    """Return the EXIF orientation, 1 (upright) by default; values outside 1 to 8 count as upright, and have a note."""
    if not exif:
        return 1
    try:
        return read_directory(exif.removeprefix(b"Exif\0\0")).integer(ORIENTATION_TAG, default=1)
    except BadDirectory:
        return 0


def orient(pixels_HWC: np.ndarray, orientation: int, notes: list[str]) -> np.ndarray:
    """Turns the pixels upright once; what is no orientation of 1 to 8 changes nothing."""
    if not 1 <= orientation <= 8:
        notes.append(IGNORED_NOTE)
        return pixels_HWC
    if orientation > 1:
        notes.append(ROTATED_NOTE)
    return apply_orientation(pixels_HWC, orientation)


def count_mpo_images(mpf: bytes) -> int:
    """Return the number of images of an MPO file, from its MPF segment; 0 if unknown."""
    try:
        return read_directory(mpf).integer(MPO_IMAGE_COUNT_TAG, default=0)
    except BadDirectory:
        return 0
