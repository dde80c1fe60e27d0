"""The members of a ZIP archive, by its central directory.

Python's `zipfile` holds an object for every member; here a directory of any length is streamed.
Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from etl.sources.tar import ArchiveMember
from etl.sources.zip_data import unread_method
from shardmill.errors import IntegrityError

_END, _END_64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_MAX_COMMENT = 65_535
_ENCRYPTED, _UTF8 = 1, 1 << 11
_IN_EXTRA = 0xFFFFFFFF
_ZIP64, _UNICODE_PATH = 0x0001, 0x7075
_LINK = 0o120000
# What made the entry: MS-DOS, NTFS, VFAT. Their file names have no backslashes.
_WINDOWS_HOSTS = frozenset({0, 10, 14})


@dataclass(frozen=True, slots=True)
class _Directory:
    """Location of the central directory."""

    start: int
    num_members: int
    prefix_bytes: int
    """Number of bytes before the archive in its file (a self-extractor, an HTTP header); all offsets count
    from there.
    """


def zip_members(file: BinaryIO, size_bytes: int) -> Iterator[ArchiveMember]:
    """Every member, in the order of the directory; `start` is its local header in the file.

    Raises IntegrityError if there is no directory (a cut archive has none) or it does not parse.
    """
    directory = _directory(file, size_bytes)
    file.seek(directory.start)
    for _ in range(directory.num_members):
        head = file.read(_ENTRY.size)
        if len(head) < _ENTRY.size or head[:4] != b"PK\x01\x02":
            raise IntegrityError("its directory does not parse")
        fields = _ENTRY.unpack(head)
        flags, size = fields[3], fields[9]
        name_length, extra_length, comment_length, place = *fields[10:13], fields[16]
        name, extra = file.read(name_length), file.read(extra_length)
        file.seek(comment_length, io.SEEK_CUR)
        size, place = _large(extra, size, fields[8], place)
        text = _path(name, extra, flags, host=fields[1] >> 8)
        fault = _fault(flags, fields[4], mode=fields[15] >> 16)
        yield ArchiveMember(text, place + directory.prefix_bytes, size, text.endswith("/"), fault)


def _fault(flags: int, method: int, mode: int) -> str:
    """Why the member cannot be read as a file; empty if it can."""
    if flags & _ENCRYPTED:
        return "encrypted"
    return "a symbolic link" if mode & 0o170000 == _LINK else unread_method(method)


def _path(name: bytes, extra: bytes, flags: int, host: int) -> str:
    """A member's path with `/` between its folders, whatever wrote it."""
    is_utf8 = bool(flags & _UTF8) or name.isascii()
    # In place of letters that the old code page lacks, the name itself may have `_` or `?`.
    text = None if flags & _UTF8 else _unicode_path(name, extra)
    if text is not None:
        is_utf8 = True
    else:
        try:
            # macOS and Info-ZIP write UTF-8 without saying so.
            text, is_utf8 = name.decode(), True
        except UnicodeDecodeError:
            text = name.decode("utf-8" if is_utf8 else "cp437", "surrogateescape")
    # In a name of several bytes a character, a backslash may be half of one.
    is_separator = "/" not in text or (host in _WINDOWS_HOSTS and is_utf8)
    return text.replace("\\", "/") if is_separator else text


def _unicode_path(name: bytes, extra: bytes) -> str | None:
    """Return the name in the field 4.6.9, unless another program has renamed the member since."""
    for data in _fields(extra, _UNICODE_PATH):
        if len(data) > 5 and data[0] == 1 and int.from_bytes(data[1:5], "little") == zlib.crc32(name):
            try:
                return data[5:].decode()
            except UnicodeDecodeError:
                return None
    return None


def _directory(file: BinaryIO, size_bytes: int) -> _Directory:
    start = max(0, size_bytes - _END.size - _MAX_COMMENT)
    file.seek(start)
    tail = file.read(size_bytes - start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END.size > len(tail):
        raise IntegrityError("it has no directory: it is truncated, or not a ZIP archive")
    fields = _END.unpack_from(tail, place)
    end, num_members, num_bytes, stated = start + place, fields[4], fields[5], fields[6]
    if num_members == 0xFFFF or num_bytes == _IN_EXTRA or stated == _IN_EXTRA:
        file.seek(max(0, end - _LOCATOR_64.size))
        locator = file.read(_LOCATOR_64.size)
        if locator[:4] == b"PK\x06\x07":
            end, fields_64 = _end_64(file, end - _LOCATOR_64.size, _LOCATOR_64.unpack(locator)[2])
            num_members, num_bytes, stated = fields_64[7:10]
    # The directory ends where the record of its end begins.
    prefix_bytes = end - num_bytes - stated
    if prefix_bytes <= 0 or (num_members and not _is_entry(file, stated + prefix_bytes)):
        prefix_bytes = 0
    return _Directory(stated + prefix_bytes, num_members, prefix_bytes)


def _end_64(file: BinaryIO, locator: int, stated: int) -> tuple[int, tuple]:
    """Place and fields of the ZIP64 end record; behind a prefix it stands right before its locator."""
    for place in (stated, locator - _END_64.size):
        file.seek(max(0, place))
        record = file.read(_END_64.size)
        if len(record) == _END_64.size and record[:4] == b"PK\x06\x06":
            return place, _END_64.unpack(record)
    raise IntegrityError("its ZIP64 directory does not parse")


def _is_entry(file: BinaryIO, place: int) -> bool:
    file.seek(place)
    return file.read(4) == b"PK\x01\x02"


def _large(extra: bytes, size: int, packed_size: int, place: int) -> tuple[int, int]:
    """Size and place; those over 4 GB stand in the ZIP64 field (4.5.3), in this order if they are there."""
    for data in _fields(extra, _ZIP64):
        values = iter(struct.iter_unpack("<Q", data[: len(data) // 8 * 8]))
        size = next(values, (size,))[0] if size == _IN_EXTRA else size
        if packed_size == _IN_EXTRA:
            next(values, None)
        place = next(values, (place,))[0] if place == _IN_EXTRA else place
    return size, place


def _fields(extra: bytes, wanted: int) -> Iterator[bytes]:
    """The extra fields of one kind (4.5)."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == wanted:
            yield extra[position + 4 : position + 4 + length]
        position += 4 + length
