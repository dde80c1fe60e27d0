"""Recognises the kind of source behind a URI by reading it, so that `shardmill run SOURCE` needs no `source.kind`."""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pyarrow as pa

from etl.sources import SOURCES
from etl.sources.containers import Containers, is_named
from etl.sources.names import PARQUET_SUFFIXES, TABLE_SUFFIXES
from etl.sources.parquet_columns import bytes_leaf, holds_lists_of_bytes, read_footer
from etl.sources.patterns import is_pattern
from etl.sources.stored_file import open_file
from shardmill.errors import ShardmillError
from shardmill.stores import open_store

# Where data sets that are cloned keep their files.
_USUAL_FOLDERS = ("data", "train", "default")
# One request of S3's.
_MAX_REMOTE_NAMES = 1_000


def recognise(uri: str) -> str:
    """The `source.kind` of a file or pattern, by its suffix; of a folder, by the names in it; else `folders`.

    Of a remote folder that is a request or a few: the first names decide.
    """
    folder = uri if _is_remote(uri) else os.path.expanduser(uri.removeprefix("file://"))
    if _is_remote(uri) or not os.path.isdir(folder):
        kind = _kind_of(uri) or ("table" if is_named(uri, TABLE_SUFFIXES) else None)
        if kind or is_pattern(uri) or not _is_remote(uri):
            return kind or "folders"
    for place in (folder, *(f"{folder.rstrip('/')}/{name}" for name in _USUAL_FOLDERS)):
        found = sorted(_names_in(place))
        names = {suffixed: name for name in found if (suffixed := _suffix_kind(name))}
        counts = Counter(kind for name in found if (kind := _suffix_kind(name)))
        for kind, _ in counts.most_common():
            if _kind_of(f"{place}/{names[kind]}"):
                return kind
    return "folders"


def _is_remote(uri: str) -> bool:
    return "://" in uri.removeprefix("file://")


def _kind_of(uri: str) -> str | None:
    """The kind of container that a file is; Parquet files hold images or only their names."""
    kind = _suffix_kind(uri)
    return None if kind == "parquet" and not holds_images(uri) else kind


def _suffix_kind(name: str) -> str | None:
    """The kind whose files hold the images themselves. (A table beside a folder's images is not read.)"""
    entries = SOURCES.entries.items()
    return next((kind for kind, entry in entries if entry.suffixes and is_named(name, entry.suffixes)), None)


def _names_in(folder: str) -> list[str]:
    """Of what lies right in a folder: of a remote one, files among its first; none if it cannot be listed."""
    if not _is_remote(folder):
        return os.listdir(folder) if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK) else []
    try:
        first = itertools.islice(open_store(folder).list(""), _MAX_REMOTE_NAMES)
        return [file.path for file in first if "/" not in file.path]
    except (ShardmillError, FileNotFoundError):
        # The listing itself will tell what is wrong.
        return []


def holds_images(uri: str) -> bool:
    """Whether a file (of a pattern, the first one) has a column of bytes, which may be images; a table has none."""
    files = Containers(uri, PARQUET_SUFFIXES)
    try:
        with open_file(files.store, files.find().containers[0]) as stream:
            schema = read_footer(stream).schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ShardmillError):
        return False
    return any(bytes_leaf(field) is not None or holds_lists_of_bytes(field) for field in schema)
