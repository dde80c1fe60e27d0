"""The samples of a tar archive: members that share a name up to its first dot (WebDataset), with their class."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from etl.sources.names import SPLIT_OF_NAME, is_image_name
from etl.sources.tar import ArchiveMember
from shardmill.values import RejectReason

FOLDER_LABELS = "/"
"""In place of a member: the class is the folder that an image lies in."""

_MAX_LABEL_BYTES = 1 << 20
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
    for _, group in itertools.groupby(members, lambda member: _stem_of(member.name)):
        # The labels are read while the scan stands at them: a packed archive is not unpacked twice.
        while some := [_with_label(member, file, layout) for member in itertools.islice(group, _MAX_SAMPLE_MEMBERS)]:
            yield from _judged(some, layout)


def _with_label(member: ArchiveMember, file: BinaryIO, layout: TarLayout) -> tuple[ArchiveMember, bytes | None]:
    suffix = layout.label_field.partition(".")[0]
    if not suffix or not member.is_file or suffix_of(member.name) != suffix or member.size_bytes > _MAX_LABEL_BYTES:
        return member, None
    file.seek(member.start)
    return member, file.read(member.size_bytes)


def _judged(sample: list[tuple[ArchiveMember, bytes | None]], layout: TarLayout) -> Iterator[TarImage | TarReject]:
    images = [member for member, _ in sample if layout.is_image(member)]
    texts = [text for _, text in sample if text is not None]
    for member, _ in sample:
        if member.is_folder:
            continue
        if not member.is_file:
            yield TarReject(member, RejectReason.NOT_REGULAR_FILE, "a link, a device, sparse or encrypted")
        elif not images:
            yield TarReject(member, RejectReason.NOT_AN_IMAGE_NAME, "belongs to no image")
    for member in images:
        if layout.label_field == FOLDER_LABELS:
            yield _in_folder(member, layout.label_level)
        elif layout.label_field:
            label = _label_of(texts[0], layout.label_field) if texts else None
            problem = "" if label else f"no {layout.label_field} beside it"
            yield TarImage(member, label, None, problem)
        else:
            yield TarImage(member, None, None)


def _in_folder(member: ArchiveMember, label_level: int) -> TarImage:
    folders = _plain(member.name).split("/")[:-1]
    split = SPLIT_OF_NAME.get(folders[0].lower()) if len(folders) > 1 else None
    below = folders[1:] if split else folders
    place = label_level - 1 if label_level else len(below) - 1
    if not 0 <= place < len(below):
        return TarImage(member, None, split, "lies in no class folder, and others do")
    return TarImage(member, below[place], split)


def _label_of(text: bytes, label_field: str) -> str | None:
    """The class in a member: its text, or a field of its JSON."""
    _, dot, path = label_field.partition(".")
    if not dot:
        return text.decode("utf-8", "replace").strip() or None
    try:
        value: Any = json.loads(text)
        for name in path.split("."):
            value = value[name]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return str(value) if isinstance(value, str | int) and str(value).strip() else None


def _plain(name: str) -> str:
    return name.removeprefix("./")


def _stem_of(name: str) -> str:
    folder, slash, own = name.rpartition("/")
    return folder + slash + own.partition(".")[0]
