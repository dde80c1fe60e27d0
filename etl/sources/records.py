"""The records of a TFRecord file, each checked against its two checksums."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

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
    """Whether the data have the checksum that stands behind them."""


def read_records(file: BinaryIO) -> Iterator[Record]:
    """Every record from here on. Raises IntegrityError where the next one cannot be found, or the file ends in one."""
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
        raise IntegrityError(f"no record at byte {start}")
    data = file.read(length)
    end = file.read(_CRC.size)
    if len(end) < _CRC.size:
        raise IntegrityError(f"the file ends inside the record at byte {start}")
    return Record(start, data, masked_crc(data) == _CRC.unpack(end)[0])
