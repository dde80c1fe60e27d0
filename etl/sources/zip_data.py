"""The bytes of one member of a ZIP archive, unpacked no further than its stated size and checked against its CRC-32."""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import BinaryIO, Protocol

from shardmill.errors import IntegrityError

_LOCAL = struct.Struct("<4s5H3I2H")
_HAS_LZMA_END, _HAS_DESCRIPTOR = 2, 8
_READ_BYTES = 1 << 16
_STORED, _DEFLATED, _BZIP2, _LZMA = 0, 8, 12, 14
_UNREAD = {
    1: "Shrink",
    6: "Implode",
    9: "Deflate64",
    20: "Zstandard",
    93: "Zstandard",
    94: "MP3",
    95: "XZ",
    96: "JPEG",
    97: "WavPack",
    98: "PPMd",
    99: "AES encryption",
}


def unread_method(method: int) -> str:
    """Return the compression method of a member (4.4.5) if it is not supported; empty if it is."""
    if method in (_STORED, *_UNPACKERS):
        return ""
    name = _UNREAD.get(method, f"method {method}")
    return f"packed with {name}; stored, Deflate, bzip2 and LZMA are read"


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
    if method != _STORED and method not in _UNPACKERS:
        raise IntegrityError(f"it is {unread_method(method)}")
    # LZMA may end without a mark of its own; what follows is no part of it.
    has_end = method != _LZMA or bool(flags & _HAS_LZMA_END)
    data = file.read(size_bytes) if method == _STORED else _unpacked(file, method, size_bytes, size_bytes + has_end)
    if flags & _HAS_DESCRIPTOR:
        if not has_end:
            raise IntegrityError("it is packed with LZMA without an end mark, so its checksum cannot be found")
        # The CRC follows the data, with or without a signature before it.
        behind = file.read(8)
        crc = int.from_bytes(behind[4:8] if behind[:4] == b"PK\x07\x08" else behind[:4], "little")
    if len(data) != size_bytes or zlib.crc32(data) != crc:
        raise IntegrityError("its bytes have another size or checksum than the archive states")
    return data


class _Unpacker(Protocol):
    """The interface of decompressors in `bz2` and `lzma`: asked for more output without input, it uses what it kept."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int = -1) -> bytes: ...


class _Inflater:
    """`zlib`'s decompressor as an `_Unpacker`."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(-15)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


def _unlzma(file: BinaryIO, size_bytes: int) -> _Unpacker:
    """By the properties before the data (5.8.8): a version, their length, then those of LZMA."""
    head = file.read(9)
    if len(head) < 9 or head[2:4] != b"\x05\x00" or head[4] >= 9 * 5 * 5:
        raise IntegrityError("its LZMA properties do not parse")
    rest, lc = divmod(head[4], 9)
    pb, lp = divmod(rest, 5)
    # Nothing refers further back than the data are long, whatever the archive asks to be allocated.
    dict_size = min(int.from_bytes(head[5:], "little"), max(size_bytes, 1 << 12))
    filters = [{"id": lzma.FILTER_LZMA1, "lc": lc, "lp": lp, "pb": pb, "dict_size": dict_size}]
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters)


_UNPACKERS: dict[int, Callable[[BinaryIO, int], _Unpacker]] = {
    _DEFLATED: lambda file, size_bytes: _Inflater(),
    _BZIP2: lambda file, size_bytes: bz2.BZ2Decompressor(),
    _LZMA: _unlzma,
}


def _unpacked(file: BinaryIO, method: int, size_bytes: int, max_bytes: int) -> bytes:
    """The unpacked data, at most `max_bytes`; the file is left just behind the packed ones if they have an end."""
    data = bytearray()
    try:
        stream = _UNPACKERS[method](file, size_bytes)
        while not stream.eof and len(data) < max_bytes:
            packed = file.read(_READ_BYTES) if stream.needs_input else b""
            if not packed and stream.needs_input:
                break
            data += stream.decompress(packed, max_bytes - len(data))
    except (zlib.error, lzma.LZMAError, ValueError, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the storage is at fault
        raise IntegrityError(f"it does not unpack: {error}") from None
    file.seek(-len(stream.unused_data), io.SEEK_CUR)
    return bytes(data)
