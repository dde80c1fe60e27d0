"""What a name says before any byte is read: whether it may be an image's, a table's or an archive's."""

from __future__ import annotations

import os

from shardmill.printable import printable

# By name alone: what may hold an image is decided by content later. No suffix at all is given the benefit of the doubt.
IMAGE_SUFFIXES = frozenset(
    f".{suffix}"
    for suffix in (
        *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "gif", "webp", "bmp", "dib", "tif", "tiff", "heic", "heif"),
        *("avif", "jp2", "j2k", "svg", "ico", "tga", "ppm", "pgm", "pbm", "pnm", "psd", "eps", "ps", "pdf"),
        *("fits", "wmf", "mpo"),
    )
)
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz")
ZIP_SUFFIXES = (".zip",)
IDX_SUFFIXES = ("ubyte", "ubyte.gz")
PARQUET_SUFFIXES = (".parquet",)
TFRECORD_SUFFIXES = (".tfrecord", ".tfrecords", ".tfrec", ".tfrecord.gz", ".tfrecords.gz")
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
_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r"})


def is_class_name(text: str) -> bool:
    """Whether a text may name a class: not only spaces or dots, short, and all of it visible.

    `\\x1b[2J` clears the screen of who reads it.
    """
    is_short = len(text.encode("utf-8", "surrogateescape")) <= MAX_CLASS_NAME_BYTES
    return is_short and text.strip() not in ("", ".", "..") and printable(text) == text


def is_image_name(key: str) -> bool:
    """Whether a path is named like an image, or not named like anything."""
    name = key.rsplit("/", 1)[-1].lower()
    if name in _SYSTEM_FILES or name.startswith("._"):
        return False
    suffix = os.path.splitext(name.lstrip("."))[1]
    return suffix == "" or suffix in IMAGE_SUFFIXES


def is_utf8(key: str) -> bool:
    """Whether a name with surrogate escapes has none."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True
