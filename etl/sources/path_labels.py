"""What the paths of a source say: the classes and splits of its folders, the splits in the names of its files.

A level of folders is one of splits if `train` is among its names beside others (`train`, `val`), or alone. Above it may
be one wrapping folder on each level (`photos/train/cat`), or the folders of several collections or classes. In names of
files, a split is the word that differs: `test_tube-train-0.tar` and `test_tube-val-0.tar` are not a test set.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import and_
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.listed import LISTED_SCHEMA, ListingBatch, in_two_passes, listed_table
from etl.sources.names import SPLIT_OF_NAME, alike_splits, is_split, names_splits
from shardmill.errors import UsageError
from shardmill.values import Rejection, RejectReason, SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import SourceConfig


_NUM_NAMED = 3
# Samples with a folder each have labels of their own; of them, none is a split.
_MAX_FOLDERS_OF_SPLITS = 100_000


@dataclass(frozen=True, slots=True)
class FolderRule:
    """Resolves ambiguous folder structures of a source."""

    label_level: int
    """Level of the class folders, counted from the top or from split folders at the top; 0: see `is_innermost`."""
    is_innermost: bool
    """Whether the class is the folder that an image lies in, as in archives, or the outermost one."""
    takes_labels: bool = True
    """Whether folders name classes; else images keep the labels that they have, and folders name only splits."""

    @classmethod
    def of(cls, config: SourceConfig, *, is_innermost: bool) -> FolderRule:
        """Create the rule from a source's config."""
        return cls(config.label_level, is_innermost, config.label_kind != "none")


def with_folder_labels(batches: Iterable[ListingBatch], rule: FolderRule) -> Iterator[ListingBatch]:
    """A listing with the classes and splits that its folders name; see `docs/sources.md`.

    Raises UsageError if more than one level may name the classes.
    """
    folders = _Folders(rule)

    def settle() -> Callable[[pa.Table], ListingBatch]:
        folders.settle()
        return folders.labelled

    yield from in_two_passes(folders.noting_hints(batches), folders.look, settle)
    yield ListingBatch(listed_table([]), warnings=tuple(folders.warnings()))


@dataclass(frozen=True, slots=True)
class _Levels:
    """The levels of split and class, counted from 0; None for none."""

    split: int | None
    label: int | None
    """-1: the innermost folder below the split."""

    def judge(self, names: list[str]) -> _Folder:
        """Return the label and split that a folder gives to the images directly in it."""
        split_name = names[self.split] if self.split is not None and len(names) > self.split else ""
        split = SPLIT_OF_NAME.get(split_name.lower())
        if self.split is not None and split is None:
            return _Folder(None, None, "is in no split folder, and others are")
        if self.label is None:
            return _Folder(split, None)
        first = 0 if self.split is None else self.split + 1
        label = len(names) - 1 if self.label < 0 else self.label
        if not (first if self.label < 0 else 0) <= label < len(names):
            return _Folder(split, None, "is in no class folder, and others are")
        is_deeper = label < len(names) - 1 and not (self.split is not None and label < self.split == len(names) - 1)
        return _Folder(split, names[label], is_deeper=is_deeper)


@dataclass(frozen=True, slots=True)
class _Folder:
    split: str | None
    label: str | None
    fault: str = ""
    """Why its images are rejected; empty if they are not."""
    is_deeper: bool = False
    """Whether the class is named by a folder above it."""


@dataclass(slots=True)
class _Folders:
    """All folders in which images lie directly. Grows with their number, not with that of images."""

    rule: FolderRule
    paths: set[str] = field(default_factory=set)
    levels: _Levels = _Levels(None, None)
    num_images: int = 0
    deeper: str | None = None
    """The first key of those below their class folder, so that it does not depend on the order of the walk."""
    num_deeper: int = 0
    has_hints: bool = False
    """Whether something beside the images seems to hold their labels."""

    def noting_hints(self, batches: Iterable[ListingBatch]) -> Iterator[ListingBatch]:
        """The same batches."""
        for batch in batches:
            self.has_hints |= bool(batch.label_hints)
            yield batch

    def look(self, images: pa.Table) -> None:
        """Take in the folders of some images."""
        if self.rule.takes_labels or len(self.paths) <= _MAX_FOLDERS_OF_SPLITS:
            self.paths.update(map(_folder_of, images.column("key").to_numpy().tolist()))

    def settle(self) -> None:
        """All folders are known: find the levels."""
        if not self.rule.takes_labels and len(self.paths) > _MAX_FOLDERS_OF_SPLITS:
            self.paths.clear()
        folders = [path.split("/") for path in self.paths if path]
        split = self._split_level(folders, has_flat="" in self.paths)
        self.levels = _Levels(split, self._label_level(folders, split))
        # `images/` beside `train.csv` is no class, unless the config says so.
        if self.has_hints and not self.rule.label_level:
            labels = {self.levels.judge(path.split("/") if path else []).label for path in self.paths}
            if len(labels - {None}) == 1:
                self.levels = _Levels(split, None)

    def _split_level(self, folders: list[list[str]], *, has_flat: bool) -> int | None:
        levels = _levels(folders)
        for level, names in enumerate(levels):
            if names_splits(names):
                # The config may say that these are classes.
                return None if level and self.rule.label_level == level + 1 else level
            # Archives may hold one split each.
            is_inside = level == 0 and not has_flat and all(len(folder) > 1 for folder in folders)
            if self.rule.is_innermost and is_inside and all(map(is_split, names)):
                return level
            if len(names) > 1:
                break
        # `cat/train/1.jpg`, `dog/train/2.jpg`: of several folders, each has to have splits.
        fewest = 0 if has_flat else min(map(len, folders), default=0)
        for level in range(1, fewest):
            if self.rule.label_level != level + 1 and names_splits(levels[level]) and all(map(is_split, levels[level])):
                return level
        return None

    def _label_level(self, folders: list[list[str]], split: int | None) -> int | None:
        if not self.rule.takes_labels or not self.paths:
            return None
        given = self.rule.label_level
        first = 0 if split is None else split + 1
        inside = folders if split is None else [each for each in folders if len(each) > split and is_split(each[split])]
        levels = _levels(inside)
        if given:
            level = given if split == 0 else given - 1
            if level < len(levels):
                return level
            raise UsageError(
                f"source.label_level = {given}, but no image is more than {len(levels) - (split == 0)} folders deep",
                "expected the level of the class folders, counted from the top", "correct source.label_level",
            )  # fmt: skip
        if len(levels) <= first:
            # Images lie directly in split folders: these may lie in class folders.
            is_above = bool(split) and len(levels[split - 1]) > 1
            return split - 1 if is_above and split else None
        if self.rule.is_innermost:
            return -1
        fewest = 0 if split is None and "" in self.paths else min(map(len, inside))
        _check_level_is_clear(levels[:fewest], split)
        return first

    def labelled(self, images: pa.Table) -> ListingBatch:
        """Listed images with split and class; folder by folder, because folders are few."""
        keys = images.column("key").to_numpy().tolist()
        paths = [_folder_of(key) for key in keys]
        folders = {path: self.levels.judge(path.split("/") if path else []) for path in set(paths)}
        if self.rule.label_level or not self.rule.is_innermost:
            deeper = [key for key, path in zip(keys, paths, strict=True) if folders[path].is_deeper]
            self.num_deeper += len(deeper)
            self.deeper = min((self.deeper, *deeper), key=lambda key: (key is None, key), default=None)
        labels = images.column("label").combine_chunks()
        if self.rule.takes_labels:
            labels = pa.array([folders[path].label for path in paths], pa.string())
        splits = pa.array([folders[path].split for path in paths], pa.string())
        # The name of an archive has lower priority than its folders.
        columns = {"label": labels, "split": pc.coalesce(splits, images.column("split").combine_chunks())}
        for name, values in columns.items():
            images = images.set_column(images.column_names.index(name), LISTED_SCHEMA.field(name), values)
        is_kept_N = np.array([not folders[path].fault for path in paths], bool)
        refused = images.filter(pa.array(~is_kept_N)).to_pylist()
        self.num_images += len(keys) - len(refused)
        return ListingBatch(
            images.filter(pa.array(is_kept_N)), tuple(self._refused(SourceImage(**row)) for row in refused)
        )

    def _refused(self, image: SourceImage) -> Rejection:
        path = _folder_of(image.key)
        return image.rejected(RejectReason.BAD_LABEL, self.levels.judge(path.split("/") if path else []).fault, "list")

    def warnings(self) -> Iterator[str]:
        """Warnings that do not end the build."""
        if self.deeper is not None:
            label = self.levels.judge(_folder_of(self.deeper).split("/")).label
            yield (
                f"{self.num_deeper} of {self.num_images} images are deeper than their class folder, such as "
                f"{printable(self.deeper)}, assigned to class {label}; set source.label_level to change this"
            )
        levels = _levels(path.split("/") for path in self.paths if path)
        label = len(levels) - 1 if self.levels.label == -1 else self.levels.label
        alike = (
            alike_splits(names, are_classes=level == label)
            for level, names in enumerate(levels)
            if level != self.levels.split
        )
        for names in dict.fromkeys(filter(None, alike)):
            yield (
                f"the folders {', '.join(map(printable, names))} look like splits but are not recognized, so their "
                "images are mixed; name them train, val and test, or give the splits in a table"
            )


def _check_level_is_clear(levels: list[set[str]], split: int | None) -> None:
    """Raise UsageError if several of the levels that all images have may be the classes."""
    # Of those above the splits, only one with several folders may be.
    may_be = [
        level
        for level in range(len(levels))
        if split is None or level > split or (level < split and len(levels[level]) > 1)
    ]
    if len(may_be) < 2:
        return
    # Levels are counted below split folders at the top.
    named = [
        f"level {level + (split != 0)} ({', '.join(map(printable, sorted(levels[level])[:_NUM_NAMED]))}"
        f"{', ...' if len(levels[level]) > _NUM_NAMED else ''})"
        for level in may_be
    ]
    raise UsageError(
        f"every image is {len(may_be)} or more folders deep, so the classes may be {' or '.join(named)}",
        "expected one folder per class with its images directly in it",
        "select the level with --set source.label_level=N, or set source.uri to the folder above the class folders",
    )


def _levels(folders: Iterable[list[str]]) -> list[set[str]]:
    """The folders' names on each level from the top."""
    levels: defaultdict[int, set[str]] = defaultdict(set)
    for folder in folders:
        for level, name in enumerate(folder):
            levels[level].add(name)
    return [levels[level] for level in range(len(levels))]


def _folder_of(key: str) -> str:
    """The folder that a file or an archive's member lies in."""
    return key.rpartition("\0")[2].rpartition("/")[0].removeprefix("./")


_Splits = dict[str, str | None]


@dataclass(frozen=True, slots=True)
class FileSplits:
    """The splits in the names of all files of one source."""

    of: Mapping[str, str | None]
    """Path -> split; None for all paths if no path names `train`."""
    look_alikes: tuple[str, ...]
    """Words in the names that look like splits, if none of them is used."""


def splits_of(paths: Iterable[str]) -> FileSplits:
    """The split that a folder or a word of each path names; no splits if no path names `train`.

    Raises UsageError if some paths name a split and others do not, or if a path names two and it is ambiguous which is
    meant: their images would be mixed by chance.
    """
    words = {path: _Words.of(path) for path in paths}
    splits = _splits_of_words(words)
    if "train" not in splits.values():
        return FileSplits(dict.fromkeys(splits), look_alikes(words))
    without = next((path for path, split in splits.items() if split is None), None)
    if without is not None:
        named = next(path for path, split in splits.items() if split is not None)
        raise UsageError(
            f"{printable(named)} names a split, but {printable(without)} does not",
            "expected a split in the name of each file or folder, or of none",
            "select the files with a pattern in source.uri, or rename them",
        )
    return FileSplits(splits, ())


def look_alikes(paths: Iterable[str]) -> tuple[str, ...]:
    """Words in the paths of a source's files that look like splits: `val`, or `train2017` if there is also
    `val2017`."""
    return alike_splits({word for path in paths for word in _Words.of(path).all}, are_classes=False)


def with_warnings(batches: Iterable[ListingBatch], alike: Sequence[str]) -> Iterator[ListingBatch]:
    """Passes on a listing, and warns at its end about names that look like splits, if no image has a split."""
    has_splits = False
    extra_types: Mapping[str, str] = {}
    for batch in batches:
        splits, extra_types = batch.images.column("split"), batch.extra_types
        has_splits = has_splits or splits.null_count < len(splits)
        yield batch
    if alike and not has_splits:
        named = ", ".join(map(printable, alike))
        warning = (
            f"words in the file names look like splits but are not recognized ({named}), so the splits are mixed; use "
            "train, val and test as separate words in the file names, or give the splits in a table"
        )
        yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=(warning,), extra_types=extra_types)


@dataclass(frozen=True, slots=True)
class _Words:
    """One path's folders, from the top, and the words of its name."""

    folders: tuple[str, ...]
    name: tuple[str, ...]

    @classmethod
    def of(cls, path: str) -> _Words:
        *folders, name = PurePosixPath(path.lower()).parts
        return cls(tuple(folders), tuple(re.split(r"[-_.]", name)))

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.folders, *self.name)

    @property
    def splits(self) -> Counter[str]:
        """Number of occurrences of each word that names a split."""
        return Counter(word for word in self.all if word in SPLIT_OF_NAME)

    def places(self) -> dict[tuple[str, int], str]:
        """Splits by the positions of their words: counted from the front, and (as negative numbers) from the end."""
        found = {}
        for part, words in (("folder", self.folders), ("name", self.name)):
            for place, word in enumerate(words):
                if word in SPLIT_OF_NAME:
                    found[part, place] = found[part, place - len(words)] = SPLIT_OF_NAME[word]
        return found


def _splits_of_words(words: Mapping[str, _Words]) -> _Splits:
    """The split of each path, or None. Raises UsageError if a path names several splits and the choice is ambiguous."""
    splits = {path: _only({SPLIT_OF_NAME[word] for word in each.splits}) for path, each in words.items()}
    doubtful = next((path for path, split in splits.items() if split == _SEVERAL), None)
    if doubtful is None or not any("train" in each.splits or "training" in each.splits for each in words.values()):
        return {path: None if split == _SEVERAL else split for path, split in splits.items()}
    found = _by_place(words) or _by_difference(words)
    if found is None:
        named = sorted({SPLIT_OF_NAME[word] for word in words[doubtful].splits})
        raise UsageError(
            f"{printable(doubtful)} names the splits {' and '.join(named)}",
            "expected one split, or file names that differ in only one of these words",
            "select the files with a pattern in source.uri, or rename them",
        )
    return found


_SEVERAL = ""


def _only(splits: Collection[str]) -> str | None:
    return None if not splits else next(iter(splits)) if len(splits) == 1 else _SEVERAL


def _by_place(words: Mapping[str, _Words]) -> _Splits | None:
    """By the only position at which every path has a split and one of them is `train`; prefers one that differs."""
    places = {path: each.places() for path, each in words.items()}
    shared = reduce(and_, (set(found) for found in places.values()))
    choices = [{path: found[place] for path, found in places.items()} for place in sorted(shared)]
    choices = [choice for choice in choices if "train" in choice.values()]
    choices = [choice for choice in choices if len(set(choice.values())) > 1] or choices
    return dict(choices[0]) if choices and all(choice == choices[0] for choice in choices) else None


def _by_difference(words: Mapping[str, _Words]) -> _Splits | None:
    """By the words that remain after the words that all paths share are removed."""
    common = reduce(and_, (each.splits for each in words.values()))
    left = {path: {SPLIT_OF_NAME[word] for word in each.splits - common} for path, each in words.items()}
    found = {path: _only(each) for path, each in left.items()}
    return found if _SEVERAL not in found.values() and any(found.values()) else None
