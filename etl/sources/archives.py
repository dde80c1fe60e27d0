"""Lists archives of image files one after the other, in any format, and reports damaged or missing ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import BinaryIO

from etl.sources.containers import Containers, damaged, gone
from etl.sources.extra import ExtraColumns
from etl.sources.file_splits import FileSplits, splits_of, with_warnings
from etl.sources.folder_labels import FolderRule, with_folder_labels
from etl.sources.listed import ListingBatch, batches_of, listed_table
from etl.sources.mask_places import in_member
from etl.sources.names import is_image_name, is_utf8
from etl.sources.packing import reading
from etl.sources.stored_file import open_file
from etl.sources.tar import ArchiveMember
from etl.sources.tar_samples import FOLDER_LABELS, TarImage, TarLayout, TarReject, read_samples
from etl.sources.unused_labels import FilesBeside
from shardmill.errors import IntegrityError
from shardmill.storage import StoredFile
from shardmill.typed_columns import MASK
from shardmill.values import Rejection, RejectReason, SourceImage

# Images of a block are read by one task, one after the other: few jumps, and units stay small.
BLOCK_IMAGES = 64
_PEEKED_MEMBERS = 1_000


def _head_of(file: BinaryIO, member: ArchiveMember, num_bytes: int) -> bytes:
    file.seek(member.start)
    return file.read(min(num_bytes, member.size_bytes))


@dataclass(frozen=True, slots=True)
class ArchiveFormat:
    """The listing functions of one archive format; each raises IntegrityError for damage."""

    unpack: Callable[[BinaryIO], BinaryIO]
    """The file -> the bytes in which members have their places: another file if it is compressed as a whole."""
    members: Callable[[BinaryIO, StoredFile, bool], Iterator[ArchiveMember]]
    """Every member of an unpacked archive, in its order; the last argument says whether it was compressed."""
    check_end: Callable[[BinaryIO], None] = lambda stream: None
    """Checks the rest of the archive after its last member."""
    packed_block_images: int = BLOCK_IMAGES
    """Images in a block of an archive that is compressed as a whole."""
    head: Callable[[BinaryIO, ArchiveMember, int], bytes] = _head_of
    """The first so many bytes of a member, read when the listing reaches it; empty if they cannot be read."""


class Archives:
    """All archives that a source names."""

    def __init__(self, files: Containers, archive_format: ArchiveFormat, extra: ExtraColumns) -> None:
        self._files = files
        self._format = archive_format
        self._extra = extra

    def batches(
        self, layout_of: Callable[[Iterable[ArchiveMember]], TarLayout], folders: FolderRule
    ) -> Iterator[ListingBatch]:
        """Every image and every refused member; a file that is damaged or gone is one rejection.

        `layout_of` is given the first members of the first sound archive, and of damaged ones before it. Raises
        UsageError if there is no archive, or if only some of their names name a split.
        """
        found = self._files.find()
        yield ListingBatch(listed_table([]), found.rejections)
        layout = layout_of(itertools.islice(self._first_members(found.containers), _PEEKED_MEMBERS))
        takes_folders = folders.takes_labels and layout.label_field == FOLDER_LABELS
        # Labels that are no classes come as a column.
        takes_none = layout.label_field in ("", FOLDER_LABELS) and self._extra.target is None
        beside = FilesBeside(looks_at_folders=not layout.label_field) if folders.takes_labels and takes_none else None
        splits = splits_of(archive.path for archive in found.containers)
        batches = batches_of(self._entries(found.containers, layout, beside, splits), lambda: self._extra.types)
        if beside is not None:
            batches = beside.noting(batches)
        batches = with_folder_labels(batches, replace(folders, takes_labels=takes_folders))
        yield from with_warnings(batches, splits.look_alikes)

    def _entries(
        self, archives: Sequence[StoredFile], layout: TarLayout, beside: FilesBeside | None, splits: FileSplits
    ) -> Iterator[SourceImage | Rejection]:
        for archive in archives:
            try:
                yield from self._list(archive, layout, splits.of[archive.path], beside)
            except FileNotFoundError:
                yield gone(archive)

    def _first_members(self, archives: Sequence[StoredFile]) -> Iterator[ArchiveMember]:
        """As many as are sound; the listing will tell what is not."""
        for archive in archives:
            with suppress(IntegrityError), open_file(self._files.store, archive) as stream:
                with reading(archive.path):
                    file = self._format.unpack(stream)
                    yield from self._format.members(file, archive, file is not stream)
                return

    def _list(
        self, archive: StoredFile, layout: TarLayout, split: str | None, beside: FilesBeside | None
    ) -> Iterator[SourceImage | Rejection]:
        """The archive's images; if it is damaged, those before the damage and one rejection for the rest."""
        num_images = 0
        with open_file(self._files.store, archive) as stream:
            try:
                with reading(archive.path):
                    file = self._format.unpack(stream)
                    is_packed = file is not stream
                    block_images = self._format.packed_block_images if is_packed else BLOCK_IMAGES
                    members = self._format.members(file, archive, is_packed)
                    if beside is not None:
                        members = self._looking(members, file, archive.path, beside)
                    for found in read_samples(members, file, layout):
                        entry = _entry(found, archive, num_images // block_images, split)
                        yield _with_extra(entry, found, self._extra, layout) if self._extra.has_values else entry
                        num_images += isinstance(found, TarImage)
                    self._format.check_end(file)
            except IntegrityError as error:
                detail = f"{error}; the {num_images} images before that are listed"
                yield damaged(archive, detail)

    def _looking(
        self, members: Iterable[ArchiveMember], file: BinaryIO, archive: str, beside: FilesBeside
    ) -> Iterator[ArchiveMember]:
        """The same members."""
        for member in members:
            if member.is_file and is_image_name(member.name):
                beside.image(member.name)
            elif member.is_file:
                beside.other(f"{archive}\0{member.name}", partial(self._format.head, file, member))
            yield member


def _entry(found: TarImage | TarReject, archive: StoredFile, block: int, split: str | None) -> SourceImage | Rejection:
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
    return replace(image, label=found.label, split=split)


def _with_extra(
    entry: SourceImage | Rejection, found: TarImage | TarReject, extra: ExtraColumns, layout: TarLayout
) -> SourceImage | Rejection:
    if isinstance(entry, Rejection) or isinstance(found, TarReject):
        return entry
    mask = found.mask
    if mask is None and layout.mask_suffix:
        return entry.rejected(RejectReason.BAD_ROW, f"no {layout.mask_suffix} beside it", "list")
    place = {} if mask is None else {MASK: in_member(layout.mask_suffix, mask.start, mask.size_bytes)}
    text, problem = extra.of_record({**found.extra, **place}, entry.container)
    return entry.rejected(RejectReason.BAD_ROW, problem, "list") if problem else replace(entry, extra=text)
