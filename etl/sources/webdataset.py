"""Tar archives: WebDataset shards, or class folders in a plain tar.

A listing reads headers and labels; an image is read later at its own place, so no archive is scanned twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, BinaryIO

from etl.listed import ListingBatch, batches_of
from etl.sources.containers import (
    ContainerReader,
    Containers,
    gone,
    image_file,
    is_packed,
    reading,
    splits_of,
    unpacked,
)
from etl.sources.extra import ExtraColumns
from etl.sources.names import TAR_SUFFIXES, is_utf8
from etl.sources.tar import ArchiveMember, tar_members
from etl.sources.tar_samples import TarImage, TarLayout, TarReject, detect_layout, read_samples
from etl.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.typed_columns import LABEL
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig

# Images of a block are read by one task, one after the other: few jumps, and units stay small.
_BLOCK_IMAGES = 64
# A packed archive is unpacked from its start for each block, so its blocks are large.
_PACKED_BLOCK_IMAGES = 4_096
# Images hardly shrink when they are packed; an archive that grows more than this is a bomb.
_MAX_EXPANSION, _ALWAYS_ALLOWED_BYTES = 100, 1 << 30
_MAX_REST_BLOCKS = 64
_PEEKED_MEMBERS = 1_000


class WebDatasetSource:
    """Every image in the tar archives that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._archives = Containers(config.uri, TAR_SUFFIXES)
        self._extra = ExtraColumns(config.extra_columns, config.label_kind)
        self.uri = self._archives.uri

    def open(self, max_source_bytes: int) -> ContainerReader[BinaryIO]:
        """Reads members by their places."""
        return ContainerReader(self._archives.store, unpacked, _take)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no archive or only some name a split. Damage ends an archive as a rejection."""
        return batches_of(self._entries(), lambda: self._extra.types)

    def _entries(self) -> Iterator[SourceImage | Rejection]:
        found = self._archives.find()
        archives = found.containers
        yield from found.rejections
        splits = splits_of(archive.path for archive in archives)
        layout = self._layout(archives[0])
        for archive in archives:
            try:
                yield from _list_archive(self._archives.store, archive, layout, splits[archive.path], self._extra)
            except FileNotFoundError:
                yield gone(archive)

    def _layout(self, archive: StoredFile) -> TarLayout:
        config = self._config
        extra_fields = {name: name for name in self._extra.given}
        if self._extra.target is not None:
            # Such a label is one of the values, and has no usual name.
            if not config.label_field:
                raise UsageError(
                    f"source.label_kind = {config.label_kind!r}, and source.label_field is not set",
                    "expected a member's suffix, or a field of its JSON",
                    "set source.label_field, such as json.labels",
                )
            extra_fields[LABEL] = config.label_field
            label_field = ""
        else:
            label_field = config.label_field or detect_layout(_first_members(self._archives.store, archive))
        suffixes = tuple(each.strip() for each in config.image_field.lower().split(";") if each.strip())
        return TarLayout(suffixes, label_field, config.label_level, extra_fields)


def _take(archive: BinaryIO, image: SourceImage) -> bytes:
    archive.seek(image.place)
    data = archive.read(image.size_bytes)
    if len(data) < image.size_bytes:
        raise IntegrityError("its archive ends inside it")
    return data


def _list_archive(
    store: Store, archive: StoredFile, layout: TarLayout, split: str | None, extra: ExtraColumns
) -> Iterator[SourceImage | Rejection]:
    """The archive's images; if it is damaged, those before the damage and one rejection for the rest."""
    num_images = 0
    with open_file(store, archive) as stream:
        try:
            with reading(archive.path):
                file = unpacked(stream, archive)
                for found in read_samples(_members(file, archive), file, layout):
                    block = num_images // (_PACKED_BLOCK_IMAGES if is_packed(archive.path) else _BLOCK_IMAGES)
                    entry = archive_entry(found, archive, block, split)
                    yield _with_extra(entry, found, extra) if extra.given else entry
                    num_images += isinstance(found, TarImage)
                _check_rest(file)
        except IntegrityError as error:
            detail = f"{error}; the {num_images} images before that are listed"
            yield image_file(archive).rejected(RejectReason.DAMAGED_CONTAINER, detail, "list")


def _with_extra(
    entry: SourceImage | Rejection, found: TarImage | TarReject, extra: ExtraColumns
) -> SourceImage | Rejection:
    if isinstance(entry, Rejection) or isinstance(found, TarReject):
        return entry
    text, problem = extra.of_record(found.extra, entry.container)
    return entry.rejected(RejectReason.BAD_ROW, problem, "list") if problem else replace(entry, extra=text)


def archive_entry(
    found: TarImage | TarReject, archive: StoredFile, block: int, split: str | None
) -> SourceImage | Rejection:
    """A member as a listed image, or why it is refused; `split` is what the archive's name says."""
    member = found.member
    image = SourceImage(
        key=f"{archive.path}\0{member.name}",
        size_bytes=member.size_bytes,
        mtime_ns=archive.mtime_ns,
        etag=archive.etag,
        container=archive.path,
        place=member.start,
        block=block,
    )
    if isinstance(found, TarReject):
        return image.rejected(found.reason, found.detail, "list")
    if not is_utf8(image.key):
        return image.rejected(RejectReason.PATH_NOT_UTF8, "the name is not UTF-8", "list")
    if found.problem:
        return image.rejected(RejectReason.BAD_LABEL, found.problem, "list")
    return replace(image, label=found.label, split=found.split or split)


def _first_members(store: Store, archive: StoredFile) -> list[ArchiveMember]:
    """Some members, as many as are sound; the listing will tell what is not."""
    members: list[ArchiveMember] = []
    with open_file(store, archive) as stream, suppress(IntegrityError), reading(archive.path):
        members.extend(itertools.islice(_members(unpacked(stream, archive), archive), _PEEKED_MEMBERS))
    return members


def _members(file: BinaryIO, archive: StoredFile) -> Iterator[ArchiveMember]:
    packed_limit = _MAX_EXPANSION * archive.size_bytes + _ALWAYS_ALLOWED_BYTES
    return tar_members(file, packed_limit if is_packed(archive.path) else archive.size_bytes)


def _check_rest(file: BinaryIO) -> None:
    """Read on behind the archive's end marker: only at the end of a packed file is its checksum compared."""
    for _ in range(_MAX_REST_BLOCKS):
        if not file.read(1 << 20):
            return
    raise IntegrityError(f"more than {_MAX_REST_BLOCKS} MB follow the end of the archive")
