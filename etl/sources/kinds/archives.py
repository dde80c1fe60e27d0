"""Lists archives of image files one after the other, in any format, and reports damaged or missing ones.

The members that share a name up to its first dot are a sample (WebDataset), with its class. Names may have further
dots: a text belongs to the image that shares its name up to the last dot, if there is one.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, BinaryIO

from etl.sources.annotations import in_member
from etl.sources.columns import class_of, text_of
from etl.sources.containers import Containers, damaged, gone, image_in, open_file, reading
from etl.sources.extra import ExtraColumns
from etl.sources.listed import ListingBatch, batches_of, listed_table
from etl.sources.names import is_image_name, is_utf8
from etl.sources.path_labels import FileSplits, FolderRule, splits_of, with_folder_labels, with_warnings
from etl.sources.unused_labels import FilesBeside
from shardmill.errors import IntegrityError
from shardmill.storage import StoredFile
from shardmill.typed_columns import MASK
from shardmill.values import Rejection, RejectReason, SourceImage

FOLDER_LABELS = "/"
"""Marker in place of a member: folders name the classes, once all of them are known."""

# A sample id, and what `sample_members` gives it.
_EXPORTED = re.compile(r"[0-9a-f]{16}\.(jpg|png|webp|mask\.png|cls|json)")
_MAX_TEXT_BYTES = 1 << 20
# Consecutive members with one name; more of them are cut into several samples, so that memory is bounded.
_MAX_SAMPLE_MEMBERS = 1_000


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """One entry of an archive; `start` is the first byte of its data."""

    name: str
    start: int
    size_bytes: int
    is_folder: bool = False
    fault: str = ""
    """Why its bytes cannot be read as a file: a link, encrypted, ...; empty if it is one."""

    @property
    def is_file(self) -> bool:
        return not self.is_folder and not self.fault


@dataclass(frozen=True, slots=True)
class TarLayout:
    """Positions of images and classes in an archive's samples."""

    image_suffixes: tuple[str, ...]
    """Suffixes of image members; empty: any image suffix."""
    label_field: str
    """A member's suffix (`cls`), a field of a JSON member (`json.class.name`), FOLDER_LABELS, or empty for none."""
    extra_fields: Mapping[str, str] = field(default_factory=dict)
    """Other values to read of a sample: a column's name -> its position, as for a label."""
    name_field: str = ""
    """Where a sample may have the name of its class, which `label_field` has as a number; empty: nowhere."""
    mask_suffix: str = ""
    """Suffix of an image's mask (`mask.png`), which is no image; empty: no masks."""

    @property
    def read_suffixes(self) -> frozenset[str]:
        """Suffixes of the members whose text is read: `json` for `json.class.name`, or all of it if there is such."""
        fields = (self.label_field, self.name_field, *self.extra_fields.values())
        return frozenset(suffix for name in fields for suffix in (name, name.partition(".")[0])) - {"", FOLDER_LABELS}

    def is_image(self, member: ArchiveMember) -> bool:
        if not member.is_file or self.is_mask(member):
            return False
        return suffix_of(member.name) in self.image_suffixes if self.image_suffixes else is_image_name(member.name)

    def is_mask(self, member: ArchiveMember) -> bool:
        return self.mask_suffix != "" and member.name.lower().endswith(f".{self.mask_suffix}")


@dataclass(frozen=True, slots=True)
class TarImage:
    """An image with the other members of its sample."""

    member: ArchiveMember
    label: str | None
    problem: str = ""
    """Why it has no label, if it should have one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """The values of the extra fields that its sample has."""
    mask: ArchiveMember | None = None
    """Its mask, if it has one."""


@dataclass(frozen=True, slots=True)
class TarReject:
    """A member that is not part of an image's sample."""

    member: ArchiveMember
    reason: RejectReason
    detail: str


def suffix_of(name: str) -> str:
    """Return the suffix after the first dot of a member's base name, in lower case: `a/0001.SEG.png` -> `seg.png`."""
    return name.rpartition("/")[2].partition(".")[2].lower()


def detect_layout(members: Iterable[ArchiveMember]) -> tuple[str, str]:
    """The label field that the first members of a source show, and the name field of what `export-tar` wrote."""
    names = [member.name for member in members if member.is_file]
    if any(last_suffix(name) == "cls" for name in names):
        is_export = all(_EXPORTED.fullmatch(name) for name in names)
        return "cls", "json.class_name" if is_export else ""
    texts = [name for name in names if last_suffix(name) in ("json", "txt")]
    # A WebDataset without classes, whose folders may mean nothing. One LICENSE.txt beside class folders makes none.
    are_samples = texts and _are_of_samples(texts, [name for name in names if is_image_name(name)])
    return "" if are_samples else FOLDER_LABELS, ""


def _are_of_samples(texts: Iterable[str], images: Collection[str]) -> bool:
    """Whether texts are captions or metadata: an image's (`a/1.json` of `a/1.png`), or one in every image's folder."""
    if not {_stem_of(name) for name in texts}.isdisjoint(map(_stem_of, images)):
        return True
    folders_of: defaultdict[str, set[str]] = defaultdict(set)
    for name in texts:
        folder, _, own = name.rpartition("/")
        folders_of[own].add(folder)
    folders = {name.rpartition("/")[0] for name in images}
    return any(found >= folders for found in folders_of.values())


def read_samples(members: Iterable[ArchiveMember], file: BinaryIO, layout: TarLayout) -> Iterator[TarImage | TarReject]:
    """The images and odd members of each sample; labels are read from `file`."""
    suffixes = layout.read_suffixes
    for _, group in itertools.groupby(members, lambda member: _stem_of(member.name)):
        # Texts are read while the scan stands at them: a packed archive is not unpacked twice.
        for some in _cut(group):
            yield from _judged([_with_text(member, file, suffixes) for member in some], layout)


def _cut(members: Iterable[ArchiveMember]) -> Iterator[Iterator[ArchiveMember]]:
    """Samples of bounded size; what shares a name up to its last dot stays together as long as that is possible."""
    number, size, name = 0, 0, ""

    def sample_of(member: ArchiveMember) -> int:
        nonlocal number, size, name
        before, name = name, _last_stem(member.name)
        if size >= 2 * _MAX_SAMPLE_MEMBERS or (size >= _MAX_SAMPLE_MEMBERS and name != before):
            number, size = number + 1, 0
        size += 1
        return number

    return (some for _, some in itertools.groupby(members, sample_of))


def _with_text(member: ArchiveMember, file: BinaryIO, suffixes: frozenset[str]) -> tuple[ArchiveMember, bytes | None]:
    is_read = bool(suffixes.intersection((suffix_of(member.name), last_suffix(member.name)))) and member.is_file
    if not is_read or member.size_bytes > _MAX_TEXT_BYTES:
        return member, None
    file.seek(member.start)
    return member, file.read(member.size_bytes)


def _judged(sample: list[tuple[ArchiveMember, bytes | None]], layout: TarLayout) -> Iterator[TarImage | TarReject]:
    images = [member for member, _ in sample if layout.is_image(member)]
    for member, _ in sample:
        if member.is_folder:
            continue
        if not member.is_file:
            yield TarReject(member, RejectReason.NOT_REGULAR_FILE, member.fault)
        elif not images:
            yield TarReject(member, RejectReason.NOT_AN_IMAGE_NAME, "belongs to no image")
    texts = _Texts(sample)
    # By the name of their image without its suffix; of two of one name the first, as with texts.
    masks = {
        member.name[: -len(layout.mask_suffix) - 1]: member
        for member, _ in reversed(sample)
        if layout.is_mask(member) and member.is_file
    }
    for member in images:
        found = {name: texts.value(member.name, place) for name, place in layout.extra_fields.items()}
        extra = {name: value for name, value in found.items() if value is not None}
        label, problem = None, ""
        if layout.label_field not in ("", FOLDER_LABELS):
            name = texts.value(member.name, layout.name_field) if layout.name_field else None
            label, problem = texts.label(member.name, layout.name_field if name else layout.label_field)
        mask = next((masks[stem] for stem in _stems(member.name) if stem in masks), None)
        yield TarImage(member, label, problem, extra, mask)


class _Texts:
    """The texts of one sample's members."""

    def __init__(self, sample: Iterable[tuple[ArchiveMember, bytes | None]]) -> None:
        self._texts: dict[tuple[str, str], bytes] = {}
        for member, text in sample:
            if text is not None:
                self._texts.setdefault((_stem_of(member.name), suffix_of(member.name)), text)
                self._texts.setdefault((_last_stem(member.name), last_suffix(member.name)), text)

    def label(self, image: str, place: str) -> tuple[str | None, str]:
        """The class of an image, or None and why it has none."""
        value = self._found(image, place)
        return (None, f"no {place} beside it") if value is None else class_of([value], place)

    def value(self, image: str, place: str) -> Any:
        """Return the value of a member, or of a part of its JSON, of each object of a list there; None if there is
        none.
        """
        value = self._found(image, place)
        return (text_of(value) or value.decode("utf-8", "replace")).strip() if isinstance(value, bytes) else value

    def _found(self, image: str, place: str) -> Any:
        suffix, dot, path = place.partition(".")
        own = self._member(image, place)
        if own is not None or not dot:
            return own
        try:
            value: Any = json.loads(self._member(image, suffix) or b"")
            for part in path.split("."):
                value = [each[part] for each in value] if isinstance(value, list) else value[part]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return value

    def _member(self, image: str, suffix: str) -> bytes | None:
        """The member beside an image; one that has the image's own name up to the last dot comes first."""
        stems = _stems(image)
        return next((self._texts[stem, suffix] for stem in stems if (stem, suffix) in self._texts), None)


def _stems(image: str) -> tuple[str, str]:
    """What the names of its other members begin with: its own up to the last dot comes first."""
    return _last_stem(image), _stem_of(image)


def _stem_of(name: str) -> str:
    folder, slash, own = name.rpartition("/")
    return folder + slash + own.partition(".")[0]


def _last_stem(name: str) -> str:
    folder, slash, own = name.rpartition("/")
    return folder + slash + (own.rpartition(".")[0] or own)


def last_suffix(name: str) -> str:
    """Return the suffix after the last dot, in lower case: `a/img.v1.CLS` -> `cls`."""
    return name.rpartition("/")[2].rpartition(".")[2].lower()


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
    image = image_in(archive, member.name, member.start, block, member.size_bytes)
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
    return extra.of_record(entry, {**found.extra, **place})
