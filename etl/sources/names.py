"""Names of files and folders: possible images, tables, archives and splits, and patterns of them.

Nothing is opened. Patterns have `*`, `?`, `[ab]`, ranges of numbers `{000..146}` and lists `{train,test}`.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import lru_cache

from shardmill.images.extensions import FORMAT_BY_EXTENSION
from shardmill.words import printable

# By name alone: what may hold an image is decided by content later. No suffix at all is given the benefit of the doubt.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *FORMAT_BY_EXTENSION,
        *("jp2", "j2k", "svg", "ico", "tga", "ppm", "pgm", "pbm", "pnm", "psd", "eps", "ps", "pdf", "fits", "wmf"),
        *("dng", "nef", "nrw", "cr2", "arw", "srf", "sr2", "pef", "srw", "orf", "rw2", "raf"),
    )
)
TAR_SUFFIXES = (
    *(".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz", ".tbz2"),
    *(".tar.xz", ".txz", ".tar.zst", ".tzst"),
)
ZIP_SUFFIXES = (".zip",)
IDX_SUFFIXES = tuple(
    f"{name}{suffix}"
    for name in (
        "ubyte",
        *(f"idx{dims}-{kind}" for dims in range(1, 5) for kind in ("byte", "short", "int", "float", "double")),
    )
    for suffix in ("", ".gz")
)
CIFAR_SUFFIXES = tuple(
    f"{name}{suffix}"
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "train", "test")
    for suffix in ("", ".bin")
)
PARQUET_SUFFIXES = (".parquet",)
ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")
COCO_SUFFIXES = (".json",)
ICEBERG_SUFFIXES = (".metadata.json",)
TABLE_SUFFIXES = (
    *(*PARQUET_SUFFIXES, ".csv", ".tsv", ".jsonl", ".ndjson"),
    *(".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz", *ARROW_SUFFIXES),
)
# In small letters; folders, files and columns are asked whatever their case.
SPLIT_OF_NAME = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}
MAX_CLASS_NAME_BYTES = 255
# Texts of labels, for Python's and Arrow's regular expressions.
WHOLE_NUMBER = r"^([+-]?\d+)\.0*$"
NO_LABEL = r"(?i)^([+-]?nan)?$"
# Of systems and programs that keep copies of images beside them; so do folders with a dot before their name.
_SYSTEM_FOLDERS = frozenset(
    {"__macosx", "@eadir", "#recycle", "#snapshot", "$recycle.bin", "system volume information", "lost+found"}
)
_UNREAD_ARCHIVES = {
    ".rar": "RAR", ".7z": "7-Zip", ".lz4": "LZ4", ".lzma": "LZMA", ".lz": "lzip", ".z": "compress", ".ar": "ar",
    ".cab": "Cabinet", ".iso": "ISO image", ".h5": "HDF5", ".hdf5": "HDF5", ".npz": "NumPy", ".npy": "NumPy",
    ".mat": "MATLAB", ".lmdb": "LMDB", ".mdb": "LMDB", ".rec": "RecordIO",
}  # fmt: skip
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r"})


def class_name_of(text: str) -> str:
    """The class that a text names: `cat` for ` cat `, `1` for `1.0`; empty for none, such as pandas' `nan`."""
    text = re.sub(WHOLE_NUMBER, r"\1", text.strip())
    return "" if re.match(NO_LABEL, text) else text


def is_class_name(text: str) -> bool:
    """Whether a text may name a class: not only spaces or dots, short, and all of it visible.

    `\\x1b[2J` clears the screen of who reads it.
    """
    is_short = len(text.encode("utf-8", "surrogateescape")) <= MAX_CLASS_NAME_BYTES
    return is_short and text.strip() not in ("", ".", "..") and printable(text) == text


def is_image_name(key: str) -> bool:
    """Whether a path is named like an image, or not named like anything."""
    name = key.rsplit("/", 1)[-1].lower()
    if hidden_folder_of(key):
        return False
    if name in _SYSTEM_FILES or name.startswith("._"):
        return False
    suffix = os.path.splitext(name.lstrip("."))[1]
    return suffix == "" or suffix in IMAGE_SUFFIXES


def unread_archive(name: str) -> str:
    """The format of a file that may hold images and is read in no way, by its suffix; empty for any other."""
    return next((kind for suffix, kind in _UNREAD_ARCHIVES.items() if name.lower().endswith(suffix)), "")


def hidden_folder_of(key: str) -> str:
    """The folder of a path that no person fills, such as `.thumbnails`; empty if there is none."""
    return _hidden_folder_in(key.rpartition("/")[0])


@lru_cache
def _hidden_folder_in(folder: str) -> str:
    # Most files of a listing lie in the folder of the one before.
    names = folder.split("/")
    return next(
        (each for each in names if each.lower() in _SYSTEM_FOLDERS or (each[:1] == "." and each.strip("."))), ""
    )


def is_utf8(key: str) -> bool:
    """Whether a name with surrogate escapes has none."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# The innermost ones, so that lists may be nested.
_LIST = re.compile(r"\{([^{}/]*,[^{}/]*)\}")
_WILDCARDS = "*?["


def is_pattern(text: str) -> bool:
    """Whether a URI or a part of it stands for several files."""
    return names_any(text) or any(braces.search(text) for braces in (_RANGE, _LIST))


def names_any(text: str) -> bool:
    """Whether it takes whatever files there are; one that consists of braces alone names each of its files."""
    return any(character in text for character in _WILDCARDS)


def matches(path: str, pattern: str) -> bool:
    """Whether `path` fits a pattern of the same depth; `{000..146}` stands for numbers of that many digits."""
    parts = path.split("/")
    patterns = (each.split("/") for each in _without_lists(pattern))
    return any(len(parts) == len(each) and all(map(_part_matches, parts, each)) for each in patterns)


def expanded(pattern: str) -> Iterator[str]:
    """The paths that a pattern with no other signs than braces names."""
    for each in _without_lists(pattern):
        yield from _without_ranges(each)


def _without_lists(pattern: str) -> list[str]:
    """Each choice once, though a list within another one gives the outer one's other choices several times."""
    return list(dict.fromkeys(_choices(pattern)))


def _choices(pattern: str) -> Iterator[str]:
    found = _LIST.search(pattern)
    if found is None:
        yield pattern
        return
    for choice in found[1].split(","):
        yield from _choices(pattern[: found.start()] + choice + pattern[found.end() :])


def _without_ranges(pattern: str) -> Iterator[str]:
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        for rest in _without_ranges(pattern[found.end() :]):
            yield f"{pattern[: found.start()]}{number:0{len(found[1])}}{rest}"


def _part_matches(part: str, pattern: str) -> bool:
    braces = _RANGE.search(pattern)
    if braces is None:
        return fnmatchcase(part, pattern)
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    low, high = braces[1], braces[2]
    for found in re.finditer(rf"\d{{{len(low)},{len(high)}}}", part):
        is_inside = int(low) <= int(found[0]) <= int(high)
        if is_inside and fnmatchcase(part[: found.start()], head) and _part_matches(part[found.end() :], tail):
            return True
    return False


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
    # `train` and another one.
    splits = [(found, {split for split, _ in found}) for found in by_frame.values()]
    framed = [name for found, named in splits if "train" in named and len(named) > 1 for _, name in found]
    return tuple(sorted({*plain, *framed})[:_NUM_NAMED])
