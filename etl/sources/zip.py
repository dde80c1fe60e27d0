"""ZIP archives with one folder for each class, read in place: nothing is unpacked to disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from etl.sources.archives import ArchiveFormat, Archives
from etl.sources.containers import ContainerReader, Containers
from etl.sources.extra import ExtraColumns
from etl.sources.folder_labels import FolderRule
from etl.sources.listed import ListingBatch
from etl.sources.names import ZIP_SUFFIXES
from etl.sources.tar import ArchiveMember
from etl.sources.tar_samples import FOLDER_LABELS, TarLayout
from etl.sources.zip_data import read_zip_member
from etl.sources.zip_members import zip_members
from shardmill.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from etl.config import SourceConfig

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
