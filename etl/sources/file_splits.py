"""Finds the splits in the names of a source's files and folders, such as `set-train-00000.tar`.

A split is the word that differs between the names: `test_tube-train-0.tar` and `test_tube-val-0.tar` are not a test
set.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import PurePosixPath

from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import SPLIT_OF_NAME, alike_splits
from shardmill.errors import UsageError
from shardmill.words import printable

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
    splits = _told_apart(words)
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


def _told_apart(words: Mapping[str, _Words]) -> _Splits:
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
