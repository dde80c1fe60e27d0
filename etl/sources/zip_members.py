"""The members of a ZIP archive by its central directory, and the bytes of one, checked against their CRC-32.

Python's `zipfile` holds an object for every member; here a directory of any length is streamed.
Format: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, 4.3
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from etl.sources.tar import ArchiveMember
from shardmill.errors import IntegrityError

_END, _END_64 = struct.Struct("<4s4H2IH"), struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_ENTRY, _LOCAL = struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s5H3I2H")
_MAX_COMMENT = 65_535
_ENCRYPTED, _HAS_DESCRIPTOR, _UTF8 = 1, 8, 1 << 11
_STORED, _DEFLATED = 0, 8
_IN_EXTRA = 0xFFFFFFFF
_LINK = 0o120000
_READ_BYTES = 1 << 16


def zip_members(file: BinaryIO, size_bytes: int) -> Iterator[ArchiveMember]:
    """Every member, in the order of the directory; `start` is its local header. Encrypted ones are no files.

    Raises IntegrityError if there is no directory (a cut archive has none) or it does not parse.
    """
    start, num_members = _directory(file, size_bytes)
    file.seek(start)
    for _ in range(num_members):
        head = file.read(_ENTRY.size)
        if len(head) < _ENTRY.size or head[:4] != b"PK\x01\x02":
            raise IntegrityError("its directory does not parse")
        fields = _ENTRY.unpack(head)
        flags, method, size = fields[3], fields[4], fields[9]
        name_length, extra_length, comment_length, mode, place = *fields[10:13], fields[15] >> 16, fields[16]
        name, extra = file.read(name_length), file.read(extra_length)
        file.seek(comment_length, io.SEEK_CUR)
        size, place = _with_extra(extra, size, fields[8], place)
        text = name.decode("utf-8" if flags & _UTF8 else "cp437", "surrogateescape")
        is_folder = text.endswith("/")
        is_plain = not flags & _ENCRYPTED and method in (_STORED, _DEFLATED) and mode & 0o170000 != _LINK
        yield ArchiveMember(text, place, size, is_plain and not is_folder, is_folder)


def read_zip_member(file: BinaryIO, start: int, size_bytes: int) -> bytes:
    """The bytes of the member whose local header is at `start`. Raises IntegrityError if they are not what they were.

    Unpacks no more than a byte beyond `size_bytes`, whatever the archive holds.
    """
    file.seek(start)
    head = file.read(_LOCAL.size)
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        raise IntegrityError("its directory leads to no member")
    _, _, flags, method, _, _, crc, _, _, name_length, extra_length = _LOCAL.unpack(head)
    file.seek(name_length + extra_length, io.SEEK_CUR)
    data = _inflate(file, size_bytes) if method == _DEFLATED else file.read(size_bytes)
    if flags & _HAS_DESCRIPTOR:
        # The CRC stands behind the data, with or without a signature before it.
        behind = file.read(8)
        crc = int.from_bytes(behind[4:8] if behind[:4] == b"PK\x07\x08" else behind[:4], "little")
    if len(data) != size_bytes or zlib.crc32(data) != crc:
        raise IntegrityError("its bytes have another size or checksum than the archive states")
    return data


def _directory(file: BinaryIO, size_bytes: int) -> tuple[int, int]:
    """First byte of the central directory, and the number of its entries."""
    start = max(0, size_bytes - _END.size - _MAX_COMMENT)
    file.seek(start)
    tail = file.read(size_bytes - start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END.size > len(tail):
        raise IntegrityError("it has no directory: no ZIP archive, or cut")
    fields = _END.unpack_from(tail, place)
    num_members, directory = fields[4], fields[6]
    if num_members == 0xFFFF or directory == _IN_EXTRA:
        file.seek(max(0, start + place - _LOCATOR_64.size))
        locator = file.read(_LOCATOR_64.size)
        if locator[:4] == b"PK\x06\x07":
            file.seek(_LOCATOR_64.unpack(locator)[2])
            end = file.read(_END_64.size)
            if len(end) < _END_64.size or end[:4] != b"PK\x06\x06":
                raise IntegrityError("its ZIP64 directory does not parse")
            num_members, directory = _END_64.unpack(end)[7], _END_64.unpack(end)[9]
    return directory, num_members


def _with_extra(extra: bytes, size: int, packed_size: int, place: int) -> tuple[int, int]:
    """Size and place; those over 4 GB stand in the ZIP64 field (4.5.3), in this order if they are there."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        values = iter(struct.iter_unpack("<Q", extra[position + 4 : position + 4 + length // 8 * 8]))
        if kind == 1:
            size = next(values, (size,))[0] if size == _IN_EXTRA else size
            if packed_size == _IN_EXTRA:
                next(values, None)
            place = next(values, (place,))[0] if place == _IN_EXTRA else place
        position += 4 + length
    return size, place


def _inflate(file: BinaryIO, size_bytes: int) -> bytes:
    """The unpacked data, at most a byte more than stated; the file is left just behind the packed ones."""
    stream = zlib.decompressobj(-15)
    data = bytearray()
    while not stream.eof and len(data) <= size_bytes:
        packed = stream.unconsumed_tail or file.read(_READ_BYTES)
        if not packed:
            break
        try:
            data += stream.decompress(packed, size_bytes + 1 - len(data))
        except zlib.error as error:
            raise IntegrityError(f"it does not unpack: {error}") from None
    file.seek(-len(stream.unused_data), io.SEEK_CUR)
    return bytes(data)
