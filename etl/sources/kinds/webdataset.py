"""Tar archives: WebDataset shards, or class folders in a plain tar.

A listing reads headers and labels; an image is read later at its own place, so no archive is scanned twice. Headers are
ustar, pax and GNU long names, every length bounded (docs/decisions/0011: why not `tarfile`). Format:
https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from etl.sources.annotations import SIZE_FIELDS, ReaderOfMasks
from etl.sources.containers import ContainerReader, Containers, refused_if_large, unpacked
from etl.sources.extra import ExtraColumns
from etl.sources.kinds.archives import FOLDER_LABELS, ArchiveFormat, ArchiveMember, Archives, TarLayout, detect_layout
from etl.sources.listed import ListingBatch
from etl.sources.names import TAR_SUFFIXES
from etl.sources.path_labels import FolderRule
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import StoredFile
from shardmill.typed_columns import BOX_LABELS, BOXES, LABEL
from shardmill.values import Rejection, SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import BoxesConfig, SourceConfig
    from etl.sources import SourceReader


_BLOCK = 512
_EMPTY = bytes(_BLOCK)
_MAX_EXTENDED_BYTES = 1 << 20
_FOLDER, _HARD_LINK, _LONG_NAME, _LONG_LINK = b"5", b"1", b"L", b"K"
_PAX, _PAX_GLOBAL, _SOLARIS = b"x", b"g", b"X"
_REGULAR = (b"0", b"\0", b"7")
_FAULTS = {b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a named pipe", b"S": "a sparse file"}
# Of the latest files, so that hard links find their targets: some 30 MB.
_MAX_TARGETS = 100_000


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


# A packed archive is unpacked from its start for each block, so its blocks are large.
_PACKED_BLOCK_IMAGES = 4_096
# Images hardly shrink when they are packed; an archive that grows more than this is a bomb.
_MAX_EXPANSION, _ALWAYS_ALLOWED_BYTES = 100, 1 << 30
_MAX_REST_BLOCKS = 64


class WebDatasetSource:
    """Every image in the tar archives that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config.without_box_labels
        self._archives = Containers(config.uri, TAR_SUFFIXES)
        self._extra = ExtraColumns.of_source(config)
        self.uri = self._archives.uri

    def open(self, max_source_bytes: int) -> SourceReader:
        """Reads members by their places."""

        def reader() -> ContainerReader[BinaryIO]:
            return ContainerReader(self._archives.store, lambda stream, archive: unpacked(stream), take)

        def take(archive: BinaryIO, image: SourceImage) -> bytes | Rejection:
            # A listing refuses large images, and knows no limit of masks.
            return refused_if_large(image, image.size_bytes, max_source_bytes) or _take(archive, image)

        return ReaderOfMasks(reader(), reader()) if self._config.mask_field else reader()

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no archive or only some name a split. Damage ends an archive as a rejection."""
        archives = Archives(self._archives, _TAR, self._extra)
        return archives.batches(self._layout, FolderRule.of(self._config, is_innermost=True))

    def _layout(self, members: Iterable[ArchiveMember]) -> TarLayout:
        config = self._config
        extra_fields = {name: name for name in self._extra.given} | _box_fields(config.boxes)
        name_field = ""
        if self._extra.target is not None:
            # Such a label is one of the values, and has no usual name.
            if not config.label_field:
                raise UsageError(
                    f"source.label_kind = {config.label_kind!r}, but source.label_field is not set",
                    "expected a member's suffix, or a field of its JSON",
                    "set source.label_field, such as json.labels",
                )
            extra_fields[LABEL] = config.label_field
            label_field = ""
        else:
            # A level that is given is one of folders.
            label_field = config.label_field or (FOLDER_LABELS if config.label_level else "")
            if not label_field:
                label_field, name_field = detect_layout(members)
            if config.label_kind == "none" and label_field != FOLDER_LABELS:
                label_field = name_field = ""
        suffixes = tuple(each.strip() for each in config.image_field.lower().split(";") if each.strip())
        return TarLayout(suffixes, label_field, extra_fields, name_field, config.mask_field.lower())


def _box_fields(boxes: BoxesConfig) -> dict[str, str]:
    """Where a sample has its boxes, by the names of `BoxColumns.of_record`; the size is beside them in their JSON."""
    if not boxes.field:
        return {}
    suffix = boxes.field.partition(".")[0]
    labels = {BOX_LABELS: boxes.labels_field} if boxes.labels_field else {}
    size = dict(zip(SIZE_FIELDS, (f"{suffix}.width", f"{suffix}.height"), strict=True))
    return {BOXES: boxes.field, **labels, **size}


def _take(archive: BinaryIO, image: SourceImage) -> bytes:
    archive.seek(image.place)
    data = archive.read(image.size_bytes)
    if len(data) < image.size_bytes:
        raise IntegrityError("its archive ends inside it")
    return data


def _members(file: BinaryIO, archive: StoredFile, is_packed: bool) -> Iterator[ArchiveMember]:
    if not is_packed:
        return tar_members(file, archive.size_bytes)
    # The target of a link lies behind: the archive would be unpacked from its start for each.
    return tar_members(file, _MAX_EXPANSION * archive.size_bytes + _ALWAYS_ALLOWED_BYTES, follows_links=False)


def _check_rest(file: BinaryIO) -> None:
    """Read on behind the archive's end marker: only at the end of a packed file is its checksum compared."""
    for _ in range(_MAX_REST_BLOCKS):
        if not file.read(1 << 20):
            return
    raise IntegrityError(f"more than {_MAX_REST_BLOCKS} MB follow the end of the archive")


_TAR = ArchiveFormat(unpacked, _members, _check_rest, _PACKED_BLOCK_IMAGES)
