"""Recognises the kind of source behind a URI by reading it, so that `shardmill run SOURCE` needs no `source.kind`."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

from etl.sources import SOURCES
from etl.sources.containers import is_named
from etl.sources.names import COCO_SUFFIXES, TABLE_SUFFIXES, is_pattern
from shardmill.dataset.versions import split_version
from shardmill.errors import ShardmillError
from shardmill.registry import load_object
from shardmill.stores import open_store

# Where data sets that are cloned keep their files.
_USUAL_FOLDERS = ("data", "train", "default")
# One request of S3's.
_MAX_REMOTE_NAMES = 1_000


def recognise(uri: str) -> str:
    """The `source.kind` of a file or pattern, by its suffix; of a folder, by the names in it; else `folders`.

    Of a remote folder that is a request or a few: the first names decide.
    """
    table = split_version(uri)[0]
    for kind, entry in SOURCES.entries.items():
        if entry.version_log and (uri.startswith(f"{kind}://") or _has_log(table, entry.version_log)):
            return kind
    folder = uri if _is_remote(uri) else os.path.expanduser(uri.removeprefix("file://"))
    if _is_remote(uri) or not os.path.isdir(folder):
        kind = _kind_of(uri) or _kind_of(table) or _kind_of_list(uri)
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


def is_in_catalog(uri: str) -> bool:
    """Whether a URI is a name in a catalog of tables, and so of no place."""
    return any(entry.version_log and uri.startswith(f"{kind}://") for kind, entry in SOURCES.entries.items())


def _is_remote(uri: str) -> bool:
    return "://" in uri.removeprefix("file://")


def _kind_of(uri: str) -> str | None:
    """The kind of container that a file is, by its suffix and, if the kind asks for that, by a look into it."""
    kind = _suffix_kind(uri)
    claims = SOURCES.entries[kind].claims if kind else ""
    return kind if not claims or load_object(claims)(uri) else None


def _kind_of_list(uri: str) -> str | None:
    """Of a file that names images in place of holding them."""
    if is_named(uri, COCO_SUFFIXES):
        return "coco"
    return "table" if is_named(uri, TABLE_SUFFIXES) else None


def _suffix_kind(name: str) -> str | None:
    """The kind whose files hold the images themselves. (A table beside a folder's images is not read.)"""
    entries = SOURCES.entries.items()
    return next((kind for kind, entry in entries if entry.suffixes and is_named(name, entry.suffixes)), None)


def _has_log(folder: str, log: str) -> bool:
    """Whether a folder is a table with versions: its files are those of several, so they are no source of their own."""
    if not _is_remote(folder):
        path = Path(os.path.expanduser(folder.removeprefix("file://")))
        return path.is_dir() and next(path.glob(log), None) is not None
    place, _, names = log.partition("/")
    try:
        # A listing has files alone.
        files = () if is_pattern(folder) else open_store(folder).list(place)
        return any(fnmatchcase(file.path, f"{place}/{names or '*'}") for file in files)
    except (ShardmillError, FileNotFoundError):
        return False


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
