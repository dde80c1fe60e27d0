"""How a table writes the paths of its files: with Windows' backslashes, or as ids that are no paths at all."""

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
    """Of one table; a few of its files are looked up, where names alone do not tell."""

    def __init__(self, store: Store, table: str) -> None:
        self._store, self._table = store, table
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
        return uris

    def _check_are_paths(self, uris: pa.Array) -> None:
        is_id = pc.invert(pc.match_substring_regex(uris, r"://|^/|\.[^/]*$"))
        self._are_paths = not pc.all(is_id).as_py() or self._is_any_there(uris)
        if not self._are_paths and pc.any(is_id).as_py():
            raise UsageError(
                f"the table {printable(self._table)} names files as {printable(uris.drop_null()[0].as_py())!r}, which "
                "has no suffix, and no such files are there",
                "expected paths of files, relative to the table's folder, with their suffixes",
                "write a column of paths, such as images/ID.jpg, or name it with source.uri_field",
            )

    def _is_any_there(self, uris: pa.Array) -> bool:
        """Of a few that are spread over the column."""
        few = uris.drop_null()[:: max(1, len(uris) // _NUM_LOOKED_UP)]
        return any(self._store.stat(path) is not None for path in few.to_pylist())


def names_drive(uris: pa.Array) -> pa.Array:
    """A mask of paths that only Windows knows: `C:\\a.jpg`, or those of a share, `\\\\host\\a.jpg`."""
    return pc.fill_null(pc.match_substring_regex(uris, _OF_WINDOWS), False)
