"""Detects labels in files beside the images that an archive's or a folder's layout does not use."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO

from etl.sources.folder_signs import FolderSigns
from etl.sources.label_signs import named_signs, names_labels
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import TABLE_SUFFIXES, is_image_name
from etl.sources.table_signs import HEAD_BYTES, TableSigns
from etl.sources.tar import ArchiveMember
from etl.sources.tar_samples import last_suffix
from shardmill.errors import ShardmillError
from shardmill.printable import printable
from shardmill.storage import Store
from shardmill.values import Rejection, RejectReason

_MAX_JSON_BYTES = 1 << 20
_NUM_NAMED = 3
_NUM_IMAGES = 10_000
# Of detection: `images/1.jpg` beside `labels/1.txt`.
_LABEL_FOLDERS = frozenset({"label", "labels", "annotation", "annotations"})
_LIST_SUFFIXES = (*TABLE_SUFFIXES, ".json", ".txt", ".xml", ".mat", ".xlsx", ".npy")


class MemberSigns:
    """Signs of labels in archives whose layout uses no member as the label."""

    def __init__(self, head: Callable[[BinaryIO, ArchiveMember, int], bytes], *, looks_at_folders: bool) -> None:
        self._head = head
        self._found: tuple[str, ...] = ()
        self._has_read_json = False
        self._folders = FolderSigns() if looks_at_folders else None
        self._tables = TableSigns()

    @property
    def found(self) -> tuple[str, ...]:
        """The signs in the members that were noted so far."""
        folders = self._folders.found() if self._folders is not None else ()
        return (*self._found, *self._tables.found(), *folders)

    def noting(self, members: Iterable[ArchiveMember], file: BinaryIO, archive: str) -> Iterator[ArchiveMember]:
        """The members. The first `.cls`, the first JSON member's fields, tables and maybe folders are looked at."""
        for member in members:
            suffix = last_suffix(member.name) if member.is_file else ""
            if suffix == "cls" and not self._found:
                self._found = (f"{printable(archive)} has {printable(member.name)!r}",)
            elif suffix == "json" and not self._has_read_json and member.size_bytes <= _MAX_JSON_BYTES:
                self._has_read_json = True
                fields = _field_names(self._head(file, member, member.size_bytes))
                self._found += tuple(named_signs(fields, f"{archive}/{member.name}"))
            elif suffix and self._tables.wants(member.name):
                self._tables.take(f"{archive}\0{member.name}", self._head(file, member, HEAD_BYTES))
            elif suffix and is_image_name(member.name):
                self._tables.look([member.name])
                if self._folders is not None:
                    self._folders.look(member.name)
            yield member


def with_found(batches: Iterable[ListingBatch], found: Callable[[], Iterable[str]]) -> Iterator[ListingBatch]:
    """A listing, and behind it the signs that were found meanwhile."""
    yield from batches
    yield ListingBatch(LISTED_SCHEMA.empty_table(), label_signs=tuple(found()))


def with_table_signs(batches: Iterable[ListingBatch], store: Store) -> Iterator[ListingBatch]:
    """A listing of files, with the signs in the first tables among those that are not images."""
    signs = TableSigns()

    def looking() -> Iterator[ListingBatch]:
        for batch in batches:
            signs.look(batch.images.column("key").slice(0, _NUM_IMAGES).to_pylist())
            for each in batch.rejections:
                if each.reason == RejectReason.NOT_AN_IMAGE_NAME and signs.wants(each.key):
                    # The listing does not depend on what cannot be read.
                    with suppress(ShardmillError, OSError):
                        signs.take(each.key, store.read_range(each.key, 0, HEAD_BYTES))
            yield batch

    return with_found(looking(), signs.found)


def with_listed_signs(batches: Iterable[ListingBatch]) -> Iterator[ListingBatch]:
    """A listing with the signs that refused files are, by their names: `labels.csv`, `annotations.json`."""
    for batch in batches:
        signs = itertools.islice(_listed_signs(batch.rejections), _NUM_NAMED)
        yield replace(batch, label_signs=(*batch.label_signs, *signs))


def _listed_signs(rejections: Iterable[Rejection]) -> Iterator[str]:
    for each in rejections:
        folder, _, name = each.key.rpartition("\0")[2].rpartition("/")
        is_list = name.lower().endswith(_LIST_SUFFIXES)
        if is_list and (names_labels(name.partition(".")[0]) or _LABEL_FOLDERS.intersection(folder.lower().split("/"))):
            yield (
                f"{printable(each.key)!r} is stored beside the images (a table that names them can be used as a source)"
            )


def _field_names(text: bytes) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return list(found) if isinstance(found, dict) else []
