"""What kind of source a URI names, by looking: `shardmill run SOURCE` needs no `source.kind`."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from etl.sources.idx import IDX_SUFFIXES
from etl.sources.parquet import PARQUET_SUFFIXES, holds_images
from etl.sources.table_rows import TABLE_SUFFIXES
from etl.sources.webdataset import TAR_SUFFIXES

_SUFFIXES = {"webdataset": TAR_SUFFIXES, "idx": IDX_SUFFIXES, "table": TABLE_SUFFIXES}
# A folder of images often has a list of them beside it; these files hold the images themselves.
_CONTAINERS = ("webdataset", "parquet", "idx")
# Where data sets that are cloned keep their files.
_USUAL_FOLDERS = ("data", "train", "default")


def recognise(uri: str) -> str:
    """The `source.kind` of a file or pattern, by its suffix; of a local folder, by the names in it; else `folders`."""
    folder = Path(uri.removeprefix("file://")).expanduser()
    if "://" in uri.removeprefix("file://") or not folder.is_dir():
        return _kind_of(folder) or "folders"
    for place in (folder, *(folder / name for name in _USUAL_FOLDERS)):
        kinds = Counter(_kind_of(place / name) for name in sorted(_names_in(place)))
        found = [kind for kind, _ in kinds.most_common() if kind in _CONTAINERS]
        if found:
            return found[0]
    return "folders"


def _kind_of(file: Path) -> str | None:
    if file.name.lower().endswith(PARQUET_SUFFIXES) and file.is_file() and holds_images(file):
        return "parquet"
    return next((kind for kind, suffixes in _SUFFIXES.items() if file.name.lower().endswith(suffixes)), None)


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if os.access(folder, os.R_OK | os.X_OK) and folder.is_dir() else []
