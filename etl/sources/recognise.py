"""What kind of source a URI names, by looking: `shardmill run SOURCE` needs no `source.kind`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.containers import Containers, is_named
from etl.sources.names import (
    IDX_SUFFIXES,
    PARQUET_SUFFIXES,
    TABLE_SUFFIXES,
    TAR_SUFFIXES,
    TFRECORD_SUFFIXES,
    ZIP_SUFFIXES,
)
from etl.sources.parquet_columns import bytes_leaf
from etl.stored_file import open_file
from shardmill.errors import ShardmillError

# Kinds whose files hold the images themselves. (A table beside a folder's images is no reason to read the table.)
_CONTAINERS = {
    "webdataset": TAR_SUFFIXES,
    "zip": ZIP_SUFFIXES,
    "parquet": PARQUET_SUFFIXES,
    "idx": IDX_SUFFIXES,
    "tfrecord": TFRECORD_SUFFIXES,
}
# Where data sets that are cloned keep their files.
_USUAL_FOLDERS = ("data", "train", "default")


def recognise(uri: str) -> str:
    """The `source.kind` of a file or pattern, by its suffix; of a local folder, by the names in it; else `folders`."""
    folder = Path(uri.removeprefix("file://")).expanduser()
    if "://" in uri.removeprefix("file://") or not folder.is_dir():
        kind = _kind_of(uri)
        return kind or ("table" if is_named(uri, TABLE_SUFFIXES) else "folders")
    for place in (folder, *(folder / name for name in _USUAL_FOLDERS)):
        names = {suffixed: name for name in sorted(_names_in(place)) if (suffixed := _suffix_kind(name))}
        counts = Counter(kind for name in _names_in(place) if (kind := _suffix_kind(name)))
        for kind, _ in counts.most_common():
            if _kind_of(str(place / names[kind])):
                return kind
    return "folders"


def _kind_of(uri: str) -> str | None:
    """The kind of container that a file is; Parquet files hold images or only their names."""
    kind = _suffix_kind(uri)
    return None if kind == "parquet" and not holds_images(uri) else kind


def _suffix_kind(name: str) -> str | None:
    return next((kind for kind, suffixes in _CONTAINERS.items() if is_named(name, suffixes)), None)


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []


def holds_images(uri: str) -> bool:
    """Whether a file (of a pattern, the first one) has a column of bytes, which may be images; a table has none."""
    files = Containers(uri, PARQUET_SUFFIXES)
    try:
        with open_file(files.store, files.find().containers[0]) as stream:
            schema = pq.read_schema(stream)
    except (pa.ArrowException, OSError, ShardmillError):
        return False
    return any(bytes_leaf(field) is not None for field in schema)
