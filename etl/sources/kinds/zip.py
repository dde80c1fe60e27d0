"""ZIP archives with one folder for each class, read in place: nothing is unpacked to disk.

A listing streams the central directory, of any length; a task reads a member by the place of its local header, no
further than its stated size, and checks its CRC-32. `zipfile` does neither (docs/decisions/0011). Format:
https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT, whose sections are named below.
"""

from __future__ import annotations

import bz2
import io
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from etl.sources.containers import ContainerReader, Containers
from etl.sources.extra import ExtraColumns
from etl.sources.kinds.archives import FOLDER_LABELS, ArchiveFormat, ArchiveMember, Archives, TarLayout
from etl.sources.listed import ListingBatch
from etl.sources.names import ZIP_SUFFIXES
from etl.sources.path_labels import FolderRule
from shardmill.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from etl.config import SourceConfig


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


def _unlzma(file: BinaryIO, size_bytes: int) -> lzma.LZMADecompressor:
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


_UNPACKERS: dict[int, Callable[[BinaryIO, int], Any]] = {
    _DEFLATED: lambda file, size_bytes: zlib.decompressobj(-15),
    _BZIP2: lambda file, size_bytes: bz2.BZ2Decompressor(),
    _LZMA: _unlzma,
}


def _unpacked(file: BinaryIO, method: int, size_bytes: int, max_bytes: int) -> bytes:
    """The unpacked data, at most `max_bytes`; the file is left just behind the packed ones if they have an end."""
    data = bytearray()
    try:
        stream = _UNPACKERS[method](file, size_bytes)
        while not stream.eof and len(data) < max_bytes:
            # Input that was not used for want of room: `zlib` gives it back, the others keep it and need none.
            packed, needs_input = getattr(stream, "unconsumed_tail", b""), getattr(stream, "needs_input", True)
            if not packed and needs_input and not (packed := file.read(_READ_BYTES)):
                break
            data += stream.decompress(packed, max_bytes - len(data))
    except (zlib.error, lzma.LZMAError, ValueError, OSError, EOFError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the storage is at fault
        raise IntegrityError(f"it does not unpack: {error}") from None
    file.seek(-len(stream.unused_data), io.SEEK_CUR)
    return bytes(data)


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


_MAX_TEXT_BYTES = 8 << 20


def _head_of(file: BinaryIO, member: ArchiveMember, num_bytes: int) -> bytes:
    """Empty for a large member, which would be unpacked whole, and for one that is damaged."""
    if member.size_bytes > _MAX_TEXT_BYTES:
        return b""
    with suppress(IntegrityError):
        return read_zip_member(file, member.start, member.size_bytes)[:num_bytes]
    return b""


# Its members are packed one by one, so the file itself is what is read.
_ZIP = ArchiveFormat(
    unpack=lambda stream: stream,
    members=lambda file, archive, is_packed: zip_members(file, archive.size_bytes),
    head=_head_of,
)


class ZipSource:
    """Every image in the ZIP archives that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._archives = Containers(config.uri, ZIP_SUFFIXES)
        self.uri = self._archives.uri

    def open(self, max_source_bytes: int) -> ContainerReader[BinaryIO]:
        """Reads members by their places."""
        return ContainerReader(
            self._archives.store,
            lambda stream, archive: stream,
            lambda archive, image: read_zip_member(archive, image.place, image.size_bytes),
        )

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no archive, or only some name a split. A damaged one is a rejection."""
        if self._config.label_field:
            raise UsageError(
                f"source.label_field = {self._config.label_field!r}", "ZIP archives have their classes in folders",
                "leave it empty, or make a table",
            )  # fmt: skip
        archives = Archives(self._archives, _ZIP, ExtraColumns((), "class"))
        return archives.batches(
            lambda members: TarLayout((), FOLDER_LABELS), FolderRule.of(self._config, is_innermost=True)
        )
