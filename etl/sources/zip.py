"""ZIP archives with one folder for each class, read in place: nothing is unpacked to disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, BinaryIO

from etl.listed import ListingBatch, batches_of
from etl.sources.containers import ContainerReader, Containers, gone, image_file, reading, splits_of
from etl.sources.names import ZIP_SUFFIXES
from etl.sources.tar_samples import TarImage, TarLayout, detect_layout, read_samples
from etl.sources.webdataset import archive_entry
from etl.sources.zip_members import read_zip_member, zip_members
from etl.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig

_BLOCK_IMAGES = 64
_PEEKED_MEMBERS = 1_000


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
            lambda stream, file: stream,
            lambda archive, image: read_zip_member(archive, image.place, image.size_bytes),
        )

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no archive, or only some name a split. A damaged one is a rejection."""
        if self._config.label_field:
            raise UsageError(
                f"source.label_field = {self._config.label_field!r}", "ZIP archives have their classes in folders",
                "leave it empty, or make a table",
            )  # fmt: skip
        return batches_of(self._entries())

    def _entries(self) -> Iterator[SourceImage | Rejection]:
        found = self._archives.find()
        yield from found.rejections
        splits = splits_of(archive.path for archive in found.containers)
        layout = self._layout(found.containers[0])
        for archive in found.containers:
            try:
                yield from _list_archive(self._archives.store, archive, layout, splits[archive.path])
            except FileNotFoundError:
                yield gone(archive)

    def _layout(self, archive: StoredFile) -> TarLayout:
        members = []
        with open_file(self._archives.store, archive) as file, suppress(IntegrityError), reading(archive.path):
            members.extend(itertools.islice(zip_members(file, archive.size_bytes), _PEEKED_MEMBERS))
        return TarLayout((), detect_layout(members), self._config.label_level)


def _list_archive(
    store: Store, archive: StoredFile, layout: TarLayout, split: str | None
) -> Iterator[SourceImage | Rejection]:
    num_images = 0
    with open_file(store, archive) as file:
        try:
            with reading(archive.path):
                for found in read_samples(zip_members(file, archive.size_bytes), file, layout):
                    yield archive_entry(found, archive, num_images // _BLOCK_IMAGES, split)
                    num_images += isinstance(found, TarImage)
        except IntegrityError as error:
            detail = f"{error}; the {num_images} images before that are listed"
            yield image_file(archive).rejected(RejectReason.DAMAGED_CONTAINER, detail, "list")
