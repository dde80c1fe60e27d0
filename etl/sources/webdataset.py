"""Tar archives: WebDataset shards, or class folders in a plain tar.

A listing reads headers and labels; an image is read later at its own place, so no archive is scanned twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from etl.sources.archives import ArchiveFormat, Archives
from etl.sources.boxes import SIZE_FIELDS
from etl.sources.containers import ContainerReader, Containers, refused_if_large
from etl.sources.extra import ExtraColumns
from etl.sources.folder_labels import FolderRule
from etl.sources.listed import ListingBatch
from etl.sources.mask_places import ReaderOfMasks
from etl.sources.names import TAR_SUFFIXES
from etl.sources.packing import unpacked
from etl.sources.tar import ArchiveMember, tar_members
from etl.sources.tar_samples import FOLDER_LABELS, TarLayout, detect_layout
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import StoredFile
from shardmill.typed_columns import BOX_LABELS, BOXES, LABEL
from shardmill.values import Rejection, SourceImage

if TYPE_CHECKING:
    from etl.boxes_config import BoxesConfig
    from etl.config import SourceConfig
    from etl.sources import SourceReader

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
