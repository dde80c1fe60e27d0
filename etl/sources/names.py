"""Classifies files by their names, before any byte is read: possible images, tables and archives."""

from __future__ import annotations

import os
import re
from functools import lru_cache

from shardmill.images.extensions import FORMAT_BY_EXTENSION
from shardmill.printable import printable

# By name alone: what may hold an image is decided by content later. No suffix at all is given the benefit of the doubt.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *FORMAT_BY_EXTENSION,
        *("jp2", "j2k", "svg", "ico", "tga", "ppm", "pgm", "pbm", "pnm", "psd", "eps", "ps", "pdf", "fits", "wmf"),
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
TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")
COCO_SUFFIXES = (".json",)
TABLE_SUFFIXES = (
    *(".parquet", ".csv", ".tsv", ".jsonl", ".ndjson"),
    *(".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz"),
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
    ".mat": "MATLAB", ".lmdb": "LMDB", ".mdb": "LMDB", ".arrow": "Arrow", ".rec": "RecordIO",
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
