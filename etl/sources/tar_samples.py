"""The samples of a tar archive: members that share a name up to its first dot (WebDataset), with their class."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from etl.sources.names import SPLIT_OF_NAME, is_image_name
from etl.sources.tar import ArchiveMember
from shardmill.values import RejectReason

FOLDER_LABELS = "/"
"""In place of a member: the class is the folder that an image lies in."""

_MAX_TEXT_BYTES = 1 << 20
# Consecutive members with one name; more of them are cut into several samples, so that memory is bounded.
_MAX_SAMPLE_MEMBERS = 1_000


@dataclass(frozen=True, slots=True)
class TarLayout:
    """Where the images and classes of an archive are."""

    image_suffixes: tuple[str, ...]
    """What may follow an image's name; empty: any suffix that images have."""
    label_field: str
    """A member's suffix (`cls`), a field of a JSON member (`json.class.name`), FOLDER_LABELS, or empty for none."""
    label_level: int
    """Which folder from the top names the class; 0: the one that the image lies in."""
    extra_fields: Mapping[str, str] = field(default_factory=dict)
    """What else is wanted of a sample: a column's name -> where its value is, as for a label."""

    @property
    def read_suffixes(self) -> frozenset[str]:
        """Suffixes of the members whose text is read."""
        return frozenset(name.partition(".")[0] for name in (self.label_field, *self.extra_fields.values())) - {""}

    def is_image(self, member: ArchiveMember) -> bool:
        if not member.is_file:
            return False
        return suffix_of(member.name) in self.image_suffixes if self.image_suffixes else is_image_name(member.name)


@dataclass(frozen=True, slots=True)
class TarImage:
    """An image with what its sample says of it."""

    member: ArchiveMember
    label: str | None
    split: str | None
    """Named by a folder inside the archive."""
    problem: str = ""
    """Why it has no label, if it should have one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The values of the extra fields that its sample has."""


@dataclass(frozen=True, slots=True)
class TarReject:
    """A member that is no part of an image's sample."""

    member: ArchiveMember
    reason: RejectReason
    detail: str


def suffix_of(name: str) -> str:
    """What follows the first dot of a member's own name, in lower case: `a/0001.SEG.png` -> `seg.png`."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def detect_layout(members: Iterable[ArchiveMember]) -> str:
    """The label field that the first members of a source show."""
    names = [member.name for member in members if member.is_file]
    suffixes = {suffix_of(name) for name in names}
    if "cls" in suffixes:
        return "cls"
    # Captions and metadata beside the images: a WebDataset without classes, whose folders mean nothing.
    if suffixes & {"json", "txt"}:
        return ""
    return FOLDER_LABELS if any("/" in _plain(name) and is_image_name(name) for name in names) else ""


def read_samples(members: Iterable[ArchiveMember], file: BinaryIO, layout: TarLayout) -> Iterator[TarImage | TarReject]:
    """The images and odd members of each sample; labels are read from `file`."""
    suffixes = layout.read_suffixes
    for _, group in itertools.groupby(members, lambda member: _stem_of(member.name)):
        # Texts are read while the scan stands at them: a packed archive is not unpacked twice.
        while some := [_with_text(member, file, suffixes) for member in itertools.islice(group, _MAX_SAMPLE_MEMBERS)]:
            yield from _judged(some, layout)


def _with_text(member: ArchiveMember, file: BinaryIO, suffixes: frozenset[str]) -> tuple[ArchiveMember, bytes | None]:
    is_read = bool(suffixes) and member.is_file and suffix_of(member.name) in suffixes
    if not is_read or member.size_bytes > _MAX_TEXT_BYTES:
        return member, None
    file.seek(member.start)
    return member, file.read(member.size_bytes)


def _judged(sample: list[tuple[ArchiveMember, bytes | None]], layout: TarLayout) -> Iterator[TarImage | TarReject]:
    images = [member for member, _ in sample if layout.is_image(member)]
    texts = {suffix_of(member.name): text for member, text in reversed(sample) if text is not None}
    found = {name: _field_of(texts, place) for name, place in layout.extra_fields.items()}
    extra = {name: value for name, value in found.items() if value is not None}
    for member, _ in sample:
        if member.is_folder:
            continue
        if not member.is_file:
            yield TarReject(member, RejectReason.NOT_REGULAR_FILE, "a link, a device, sparse or encrypted")
        elif not images:
            yield TarReject(member, RejectReason.NOT_AN_IMAGE_NAME, "belongs to no image")
    for member in images:
        if layout.label_field == FOLDER_LABELS:
            yield replace(_in_folder(member, layout.label_level), extra=extra)
        elif layout.label_field:
            value = _field_of(texts, layout.label_field)
            label = str(value).strip() if isinstance(value, str | int) else ""
            yield TarImage(member, label or None, None, "" if label else f"no {layout.label_field} beside it", extra)
        else:
            yield TarImage(member, None, None, extra=extra)


def _in_folder(member: ArchiveMember, label_level: int) -> TarImage:
    folders = _plain(member.name).split("/")[:-1]
    split = SPLIT_OF_NAME.get(folders[0].lower()) if len(folders) > 1 else None
    below = folders[1:] if split else folders
    place = label_level - 1 if label_level else len(below) - 1
    if not 0 <= place < len(below):
        return TarImage(member, None, split, "lies in no class folder, and others do")
    return TarImage(member, below[place], split)


def _field_of(texts: Mapping[str, bytes], name: str) -> Any:
    """What a sample's members say of a field: a member's text, or a part of its JSON; None if they do not have it."""
    suffix, dot, path = name.partition(".")
    if suffix not in texts:
        return None
    if not dot:
        return texts[suffix].decode("utf-8", "replace").strip()
    try:
        value: Any = json.loads(texts[suffix])
        for part in path.split("."):
            value = value[part]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return value


def _plain(name: str) -> str:
    return name.removeprefix("./")


def _stem_of(name: str) -> str:
    folder, slash, own = name.rpartition("/")
    return folder + slash + own.partition(".")[0]
