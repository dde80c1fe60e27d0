"""ZIP archives with one folder for each class, read in place: nothing is unpacked to disk."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

from etl.listed import ListingBatch, batches_of
from etl.sources.archives import ArchiveFormat, Archives
from etl.sources.containers import ContainerReader, Containers
from etl.sources.extra import ExtraColumns
from etl.sources.names import ZIP_SUFFIXES
from etl.sources.tar_samples import TarLayout, detect_layout
from etl.sources.zip_members import read_zip_member, zip_members
from shardmill.errors import UsageError

if TYPE_CHECKING:
    from etl.config import SourceConfig

# Its members are packed one by one, so the file itself is what is read.
_ZIP = ArchiveFormat(
    unpack=lambda stream, archive: stream, members=lambda stream, archive: zip_members(stream, archive.size_bytes)
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
            _ZIP.unpack,
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
        return batches_of(
            archives.entries(lambda members: TarLayout((), detect_layout(members), self._config.label_level))
        )
