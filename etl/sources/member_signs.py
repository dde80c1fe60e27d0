"""Signs of labels among the files beside images: what an archive's layout, or a folder's, does not take."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import BinaryIO

from etl.sources.folder_signs import FolderSigns
from etl.sources.label_signs import named_signs, names_labels
from etl.sources.listed import ListingBatch
from etl.sources.names import TABLE_SUFFIXES, is_image_name
from etl.sources.tar import ArchiveMember
from etl.sources.tar_samples import last_suffix
from shardmill.printable import printable
from shardmill.values import Rejection

_MAX_JSON_BYTES = 1 << 20
_NUM_NAMED = 3
_LIST_SUFFIXES = (*TABLE_SUFFIXES, ".json", ".txt", ".xml", ".mat", ".xlsx", ".npy")


class MemberSigns:
    """Of archives whose layout takes no member as the label."""

    def __init__(self, *, looks_at_folders: bool) -> None:
        self._found: tuple[str, ...] = ()
        self._has_read_json = False
        self._folders = FolderSigns() if looks_at_folders else None

    @property
    def found(self) -> tuple[str, ...]:
        """The signs in the members that were noted so far."""
        return (*self._found, *(self._folders.found() if self._folders is not None else ()))

    def noting(self, members: Iterable[ArchiveMember], file: BinaryIO, archive: str) -> Iterator[ArchiveMember]:
        """The members. The first `.cls`, the fields of the first JSON member and maybe the folders are looked at."""
        for member in members:
            suffix = last_suffix(member.name) if member.is_file else ""
            if suffix == "cls" and not self._found:
                self._found = (f"{printable(archive)} has {printable(member.name)!r}",)
            elif suffix == "json" and not self._has_read_json and member.size_bytes <= _MAX_JSON_BYTES:
                self._has_read_json = True
                file.seek(member.start)
                fields = _field_names(file.read(member.size_bytes))
                self._found += tuple(named_signs(fields, f"{archive}/{member.name}"))
            elif self._folders is not None and suffix and is_image_name(member.name):
                self._folders.look(member.name)
            yield member


def with_listed_signs(batches: Iterable[ListingBatch]) -> Iterator[ListingBatch]:
    """A listing with the signs that refused files are, by their names: `labels.csv`, `annotations.json`."""
    for batch in batches:
        signs = itertools.islice(_listed_signs(batch.rejections), _NUM_NAMED)
        yield replace(batch, label_signs=(*batch.label_signs, *signs))


def _listed_signs(rejections: Iterable[Rejection]) -> Iterator[str]:
    for each in rejections:
        name = each.key.rpartition("\0")[2].rpartition("/")[2]
        if name.lower().endswith(_LIST_SUFFIXES) and names_labels(name.partition(".")[0]):
            yield f"{printable(each.key)!r} lies beside the images (a table that names them is a source of its own)"


def _field_names(text: bytes) -> list[str]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return list(found) if isinstance(found, dict) else []
