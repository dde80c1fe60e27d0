"""Recognises folders that are named like splits, such as `train`, or `seg_train` beside `seg_test`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection

from etl.sources.names import SPLIT_OF_NAME

# The longest first: `training_set` is not `train` with something behind it.
_WORD = re.compile("|".join(sorted(SPLIT_OF_NAME, key=len, reverse=True)))
_NUM_NAMED = 4


def is_split(name: str) -> bool:
    """Whether a folder has the name of a split."""
    return name.lower() in SPLIT_OF_NAME


def names_splits(names: Collection[str]) -> bool:
    """Whether the folders of one level are splits: `train` beside `bus` and `car` is a vehicle."""
    splits = [name for name in names if is_split(name)]
    has_train = any(SPLIT_OF_NAME[name.lower()] == "train" for name in splits)
    return has_train and (len(splits) == len(names) or len(splits) > 1)


def alike_splits(names: Collection[str], *, are_classes: bool) -> tuple[str, ...]:
    """Folders of one level that may be meant as splits, if they are not taken as such; a few of them.

    These are the names of splits themselves, unless they name classes, and `train` and another one with the same
    letters before and behind them.
    """
    plain = [] if are_classes else [name for name in names if is_split(name)]
    by_frame: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in names:
        for word in _WORD.finditer(name.lower()):
            frame = f"{name[: word.start()]}\0{name[word.end() :]}".lower()
            by_frame[frame].append((SPLIT_OF_NAME[word[0]], name))
    by_frame.pop("\0", None)
    framed = [name for found in by_frame.values() if _has_train_and_another(found) for _, name in found]
    return tuple(sorted({*plain, *framed})[:_NUM_NAMED])


def _has_train_and_another(found: Collection[tuple[str, str]]) -> bool:
    splits = {split for split, _ in found}
    return "train" in splits and len(splits) > 1
