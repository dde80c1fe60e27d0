"""Detects how a table writes the paths of its files: relative to its folder, with Windows' backslashes, or as ids."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from shardmill.errors import UsageError
from shardmill.printable import printable
from shardmill.storage import Store

_NUM_LOOKED_UP = 8
_OF_WINDOWS = r"^(file:/*)?[A-Za-z]:[\\/]|^\\\\"


class PathStyle:
    """The path style of one table; some of its files are looked up if names alone are ambiguous."""

    def __init__(self, store: Store, table: str, *, looks_beside: bool = False) -> None:
        """`looks_beside`: whether a table in a folder is checked to name files from there."""
        self._store, self._table = store, table
        self._looks_beside = looks_beside and "/" in table
        self._are_backslashes_names: bool | None = None
        self._are_paths = False

    def as_paths(self, uris: pa.Array) -> pa.Array:
        """`a/b.jpg` for `a\\b.jpg`, unless files are really named so. Raises UsageError if they are ids of files."""
        has_backslash = pc.and_(pc.match_substring(uris, "\\"), pc.invert(pc.match_substring_regex(uris, _OF_WINDOWS)))
        if pc.any(has_backslash).as_py():
            if self._are_backslashes_names is None:
                self._are_backslashes_names = self._is_any_there(uris.filter(has_backslash))
            if not self._are_backslashes_names:
                uris = pc.if_else(has_backslash, pc.replace_substring(uris, "\\", "/"), uris)
        if not self._are_paths:
            self._check_are_paths(uris)
        if self._looks_beside:
            self._looks_beside = False
            self._check_lie_beside(uris)
        return uris

    def _check_are_paths(self, uris: pa.Array) -> None:
        is_id = pc.invert(pc.match_substring_regex(uris, r"://|^/|\.[^/]*$"))
        self._are_paths = not pc.all(is_id).as_py() or self._is_any_there(uris)
        if not self._are_paths and pc.any(is_id).as_py():
            raise UsageError(
                f"the table {printable(self._table)} names files as {printable(uris.drop_null()[0].as_py())!r}, which "
                "has no suffix, and no such files exist",
                "expected paths of files, relative to the table's folder, with their suffixes",
                "write a column of paths, such as images/ID.jpg, or name it with source.uri_field",
            )

    def _check_lie_beside(self, uris: pa.Array) -> None:
        # Missing files would be reported one by one when they are read; paths for another folder are reported at once.
        relative = without_dots(uris.filter(_are_relative(uris)))
        if self._is_any_there(relative) or not self._is_any_there(relative, table=""):
            return
        path, root = printable(relative[0].as_py()), self._store.uri
        raise UsageError(
            f"the table {printable(self._table)} names files as {path!r}, which is relative to {root}",
            "expected paths of files, relative to the table's folder",
            f"write {'../' * self._table.count('/')}{path}, or move the table to {root}",
        )

    def _is_any_there(self, uris: pa.Array, table: str | None = None) -> bool:
        """Of a few that are spread over the column, beside `table`; None for this one."""
        few = uris.drop_null()[:: max(1, len(uris) // _NUM_LOOKED_UP)]
        paths = beside(few, self._table if table is None else table).to_pylist()
        return any(self._store.stat(path) is not None for path in paths)


def names_drive(uris: pa.Array) -> pa.Array:
    """A mask of paths that only Windows knows: `C:\\a.jpg`, or those of a share, `\\\\host\\a.jpg`."""
    return pc.fill_null(pc.match_substring_regex(uris, _OF_WINDOWS), False)


def without_dots(uris: pa.Array) -> pa.Array:
    """`a.jpg` for `./a.jpg`: one file has one key."""
    if not pc.any(pc.starts_with(uris, "./")).as_py():
        return uris
    return pc.replace_substring_regex(uris, r"^(\./)+", "")


def beside(uris: pa.Array, table: str) -> pa.Array:
    """Paths below the source's root for paths below the table's folder; absolute URIs stay as they are.

    A file that two tables name has one key: `a/t.csv` climbs out of its folder with `../`.
    """
    folder = table.rpartition("/")[0]
    if not folder:
        return uris
    is_relative = _are_relative(uris)
    climbs = pc.and_(is_relative, pc.match_substring_regex(uris, r"^\.\./"))
    found = pc.if_else(is_relative, pc.binary_join_element_wise(folder, uris, "/"), uris)
    if not pc.any(climbs).as_py():
        return found
    climbed = [_climbed(folder, uri) for uri in uris.filter(climbs).to_pylist()]
    return pc.replace_with_mask(found, pc.fill_null(climbs, False), pa.array(climbed, pa.string()))


def _are_relative(uris: pa.Array) -> pa.Array:
    return pc.invert(pc.match_substring_regex(uris, "^/|://"))


def _climbed(folder: str, uri: str) -> str:
    while folder and uri.startswith("../"):
        folder, uri = folder.rpartition("/")[0], uri.removeprefix("../")
    return f"{folder}/{uri}" if folder else uri
