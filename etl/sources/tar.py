"""The members of a tar archive, by their headers alone: ustar, pax and GNU long names, every length bounded.

Python's `tarfile` ends silently at a damaged header, loops on a negative size, and allocates what a header claims.
Format: https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

from shardmill.errors import IntegrityError
from shardmill.printable import printable

_BLOCK = 512
_EMPTY = bytes(_BLOCK)
_MAX_EXTENDED_BYTES = 1 << 20
_FOLDER, _HARD_LINK, _LONG_NAME, _LONG_LINK = b"5", b"1", b"L", b"K"
_PAX, _PAX_GLOBAL, _SOLARIS = b"x", b"g", b"X"
_REGULAR = (b"0", b"\0", b"7")
_FAULTS = {b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a named pipe", b"S": "a sparse file"}
# Of the latest files, so that hard links find their targets: some 30 MB.
_MAX_TARGETS = 100_000


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One entry of an archive; `start` is the first byte of its data."""

    name: str
    start: int
    size_bytes: int
    is_folder: bool = False
    fault: str = ""
    """Why its bytes cannot be read as a file: a link, encrypted, ...; empty if it is one."""

    @property
    def is_file(self) -> bool:
        return not self.is_folder and not self.fault


def tar_members(file: BinaryIO, max_bytes: int, *, follows_links: bool = True) -> Iterator[ArchiveMember]:
    """Every member in order. Between two of them the caller may read the latest one's data.

    A hard link has the place of its target, if that is among the latest files; without `follows_links` it is not a
    file. Raises IntegrityError at the first invalid header, if the archive ends without its end marker, because members
    may be missing, or if it reaches past `max_bytes`. What was yielded before is sound.
    """
    position = 0
    extended: dict[str, str] = {}
    targets = _Targets(_MAX_TARGETS if follows_links else 0)
    while True:
        if position > max_bytes:
            raise IntegrityError(f"the archive reaches to byte {position}, and may to byte {max_bytes}")
        file.seek(position)
        header = file.read(_BLOCK)
        if header == _EMPTY:
            return
        size_bytes = _check_header(header, position)
        kind, start = header[156:157], position + _BLOCK
        position = start + -(-size_bytes // _BLOCK) * _BLOCK
        if kind in (_PAX, _SOLARIS):
            extended |= _pax_records(_read_extended(file, size_bytes, start))
        elif kind in (_LONG_NAME, _LONG_LINK):
            name = "path" if kind == _LONG_NAME else "linkpath"
            extended[name] = _text(_read_extended(file, size_bytes, start).split(b"\0", 1)[0])
        elif kind != _PAX_GLOBAL:
            size_bytes = _number_of(extended.get("size", str(size_bytes)), start)
            position = start + -(-size_bytes // _BLOCK) * _BLOCK
            yield targets.resolved(_member(header, extended, start, size_bytes), _link_of(header, extended))
            extended = {}


def _member(header: bytes, extended: dict[str, str], start: int, size_bytes: int) -> ArchiveMember:
    name, kind = extended.get("path") or _name(header), header[156:157]
    is_sparse = any(each.startswith("GNU.sparse") for each in extended)
    fault = "" if kind in (*_REGULAR, _FOLDER, _HARD_LINK) else _FAULTS.get(kind, f"an entry of type {kind!r}")
    return ArchiveMember(
        name, start, size_bytes, kind == _FOLDER or name.endswith("/"), _FAULTS[b"S"] if is_sparse else fault
    )


def _link_of(header: bytes, extended: dict[str, str]) -> str:
    """The path to which a hard link points; empty for every other member."""
    is_link = header[156:157] == _HARD_LINK
    return (extended.get("linkpath") or _text(header[157:257].split(b"\0", 1)[0])) if is_link else ""


class _Targets:
    """Positions of the latest files of an archive, by digests of their names, because a name may be long."""

    def __init__(self, max_files: int) -> None:
        self._max_files = max_files
        self._places: dict[bytes, tuple[int, int]] = {}

    def resolved(self, member: ArchiveMember, link: str) -> ArchiveMember:
        """The member, remembered if it is a file; a hard link as a file with its target's bytes, if that is known."""
        if link:
            place = self._places.get(_digest(link))
            if place is None:
                return replace(
                    member, fault=f"a hard link to {printable(link)}, which is not among the files before it"
                )
            member = replace(member, start=place[0], size_bytes=place[1])
        if member.is_file and self._max_files:
            if len(self._places) == self._max_files:
                del self._places[next(iter(self._places))]
            self._places[_digest(member.name)] = (member.start, member.size_bytes)
        return member


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.removeprefix("./").encode("utf-8", "surrogateescape"), digest_size=16).digest()


def _check_header(header: bytes, position: int) -> int:
    """The size that an intact header states."""
    if len(header) < _BLOCK:
        cause = "without its end marker" if not header else "inside a header"
        raise IntegrityError(f"the archive ends {cause} at byte {position}")
    # The checksum counts its own field as spaces.
    total = sum(header[:148]) + 8 * ord(" ") + sum(header[156:])
    if _octal(header[148:156], position) != total:
        raise IntegrityError(f"no member's header at byte {position}")
    field = header[124:136]
    if field[0] & 0x80:
        # Base 256, for sizes from 8 GiB; 0xFF would be a negative number.
        size_bytes = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if size_bytes >> 62:
            raise IntegrityError(f"the header at byte {position} states no size")
        return size_bytes
    return _octal(field, position)


def _octal(field: bytes, position: int) -> int:
    text = field.split(b"\0", 1)[0].strip()
    if text.strip(b"01234567"):
        raise IntegrityError(f"no member's header at byte {position}")
    return int(text or b"0", 8)


def _read_extended(file: BinaryIO, size_bytes: int, start: int) -> bytes:
    if size_bytes > _MAX_EXTENDED_BYTES:
        raise IntegrityError(f"an extended header of {size_bytes} bytes at byte {start}")
    data = file.read(size_bytes)
    if len(data) < size_bytes:
        raise IntegrityError(f"the archive ends inside a header at byte {start}")
    return data


def _pax_records(data: bytes) -> dict[str, str]:
    """`17 path=some/name\\n` and so on."""
    found: dict[str, str] = {}
    position = 0
    while position < len(data) and data[position]:
        length, separator, _ = data[position : position + 20].partition(b" ")
        end = position + int(length) if separator and length.isdigit() else 0
        name, equals, value = data[position + len(length) + 1 : end - 1].partition(b"=")
        if end <= position + len(length) + 1 or end > len(data) or not equals:
            raise IntegrityError("a pax header that does not parse")
        found[_text(name)] = _text(value)
        position = end
    return found


def _number_of(text: str, start: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise IntegrityError(f"the member at byte {start} states no size")
    return int(text)


def _name(header: bytes) -> str:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return _text(prefix + b"/" + name if prefix else name)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
