"""The records of a TFRecord file, each checked against its two checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from etl.sources.packing import Packing, packing_of
from shardmill.errors import IntegrityError
from shardmill.formats.tfrecord import masked_crc

_HEADER, _CRC = struct.Struct("<QI"), struct.Struct("<I")
_MAX_RECORD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `start` is the first byte of its header."""

    start: int
    data: bytes
    is_intact: bool
    """Whether the data match the checksum that follows them."""


def packing_of_records(file: BinaryIO) -> Packing | None:
    """Return the compression of a file, None if it has none, detected by the checksum of its first length.

    A length may look like the first bytes of a compressed file. The file is left at its beginning.
    """
    file.seek(0)
    header = file.read(_HEADER.size)
    file.seek(0)
    is_plain = len(header) == _HEADER.size and masked_crc(header[:8]) == _HEADER.unpack(header)[1]
    return None if is_plain else packing_of(file)


def unpacked_records(file: BinaryIO) -> BinaryIO:
    """The unpacked bytes, or the file itself."""
    packing = packing_of_records(file)
    return file if packing is None else packing.open(file)


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Every record from here on. Raises IntegrityError if the next one cannot be found, or the file ends in one."""
    start = file.tell()
    while (record := read_record(file, start)) is not None:
        yield record
        start += _HEADER.size + len(record.data) + _CRC.size


def read_record(file: BinaryIO, start: int) -> Record | None:
    """The record at byte `start`, None at the end of the file. Raises IntegrityError if there is no record."""
    file.seek(start)
    header = file.read(_HEADER.size)
    if not header:
        return None
    if len(header) < _HEADER.size:
        raise IntegrityError(f"the file ends inside the record at byte {start}")
    length, crc = _HEADER.unpack(header)
    # A length is trusted only after this: it says how much is read.
    if masked_crc(header[:8]) != crc or length > _MAX_RECORD_BYTES:
        is_zlib = start == 0 and header[0] & 0x0F == 8 and int.from_bytes(header[:2], "big") % 31 == 0
        hint = (
            ": it begins like zlib data (TensorFlow's compression_type ZLIB), but only plain or gzip files are "
            "supported"
        )
        raise IntegrityError(f"no record at byte {start}{hint if is_zlib else ''}")
    data = file.read(length)
    end = file.read(_CRC.size)
    if len(end) < _CRC.size:
        raise IntegrityError(f"the file ends inside the record at byte {start}")
    return Record(start, data, masked_crc(data) == _CRC.unpack(end)[0])
