"""The reader of images that a table names: files below the table's folder, or anywhere by absolute URIs."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.containers import Containers
from etl.sources.download import HTTP_SCHEMES, Downloader, NotDownloaded
from shardmill.errors import AccessDenied, UsageError
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.stores import ANY_OTHER, STORES, open_store, scheme_of
from shardmill.values import OTHER_SIZE, UNKNOWN_SIZE, Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.download_config import DownloadConfig

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


_MAX_URI_BYTES = 8_192
_NOT_OF_ROWS = (*HTTP_SCHEMES, ANY_OTHER)


class UriReader:
    """Reads whole files, of which nothing is known before but their URI; relative ones from the source's root."""

    def __init__(self, tables: Containers, max_source_bytes: int, download: DownloadConfig) -> None:
        self.num_parallel = download.num_parallel
        self._tables = tables
        self._root = tables.store
        self._downloader = Downloader(download, max_source_bytes)
        self._max_source_bytes = max_source_bytes
        self._stores: dict[str, Store] = {}

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The file's bytes. Raises FileNotFoundError, AccessDenied, StorageError; never holds more than the limit."""
        uri = image.container or image.key
        data = self._downloader.fetch(uri) if is_on_the_web(uri) else self._read(uri)
        if isinstance(data, NotDownloaded):
            return image.rejected(data.reason, data.detail)
        if len(data) > self._max_source_bytes:
            detail = f"more than {self._max_source_bytes} bytes, which is etl.max_source_bytes"
            return image.rejected(RejectReason.TOO_LARGE_BYTES, detail)
        if image.size_bytes not in (UNKNOWN_SIZE, len(data)):
            detail = f"{OTHER_SIZE} is {image.size_bytes}, and the file has {len(data)} bytes"
            return image.rejected(RejectReason.SOURCE_CHANGED, detail)
        return data

    def expect(self, image: SourceImage) -> None:
        """Does nothing: several images are read at once."""

    def is_there(self, path: str) -> bool:
        """Whether this host sees the file, or at least the place of it.

        One URL that does not answer says nothing about this host; and where a table is, it may name what is not there.
        """
        if is_on_the_web(path):
            return True
        store, path = self._locate(path)
        return store.stat(path) is not None or (store is self._root and self._tables.are_there())

    def _read(self, uri: str) -> bytes:
        """At most one byte more than the limit, whatever the file's size."""
        store, path = self._locate(uri)
        if store.local_root is None:
            return store.read_range(path, 0, self._max_source_bytes + 1)
        file = store.local_root / path
        with as_storage_error(file, denied=AccessDenied), open(file, "rb") as stream:
            return stream.read(self._max_source_bytes + 1)

    def _locate(self, uri: str) -> tuple[Store, str]:
        """The store of a URI and the path in it; one store for each bucket."""
        scheme, separator, rest = uri.partition("://")
        if not separator:
            if not os.path.isabs(uri):
                return self._root, uri
            scheme, rest = "file", uri
        top, _, path = rest.partition("/")
        root = f"{scheme}://{top}/"
        if root not in self._stores:
            self._stores[root] = open_store(root)
        return self._stores[root], path


def uri_problems(uris: pa.Array, store: Store) -> pa.Array:
    """Describe the problem of each URI of a table in `store`, as text; null if there is none."""
    schemes = pa.nulls(len(uris), pa.string())
    if pc.any(pc.match_substring(uris, "://")).as_py():
        schemes = pc.struct_field(pc.extract_regex(uris, r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"), "scheme")
    unknown = [
        name
        for name in pc.unique(schemes).to_pylist()
        # Of fsspec's schemes some name files of this machine, or hosts behind its firewall: not for a table to choose.
        if name not in (None, *HTTP_SCHEMES) and not _may_be_named(name)
    ]
    named = (*filter(_may_be_named, STORES), *HTTP_SCHEMES)
    names_local_file = pc.or_kleene(pc.starts_with(uris, "/"), pc.equal(schemes, "file"))
    # A table that was fetched from elsewhere does not choose among the files of this machine.
    is_forbidden = pc.and_(pc.fill_null(names_local_file, False), store.local_root is None)
    return pc.case_when(
        pc.make_struct(
            uris.is_null(),
            pc.fill_null(pc.greater(pc.binary_length(uris), _MAX_URI_BYTES), False),
            names_drive(uris),
            pc.is_in(schemes, pa.array(unknown, pa.string())),
            is_forbidden,
        ),
        "no URI",
        f"a URI of more than {_MAX_URI_BYTES} bytes",
        "a path with a drive or a share of Windows; expected one relative to the table's folder",
        f"this URI scheme is not supported; expected one of {', '.join(named)}",
        f"a table in {store.uri} cannot name a local file",
    )


def _may_be_named(scheme: str) -> bool:
    """Whether rows may name files of this scheme in a store."""
    entry = scheme_of(f"{scheme}://")
    return entry in STORES and entry not in _NOT_OF_ROWS


def is_on_the_web(uri: str) -> bool:
    """Whether it is fetched, from any server."""
    return uri.partition("://")[0] in HTTP_SCHEMES
