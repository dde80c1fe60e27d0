"""A Delta table as a source: the files of one version as its log lists them, read as Parquet images or as a table.

The log is read by the table's own library; files that other versions have left in the folder are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa

from etl.sources.containers import FoundFiles, VersionFiles, files_of_version
from etl.sources.kinds.parquet import PARQUET
from etl.sources.kinds.table import TableSource, source_of_rows
from etl.sources.names import PARQUET_SUFFIXES
from etl.sources.rows import ImageRows
from shardmill.dataset.versions import split_version
from shardmill.errors import StorageError, UsageError
from shardmill.words import printable

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from etl.config import SourceConfig


# Of what a reader must know, what changes neither which rows there are nor the names of their columns.
_HARMLESS_FEATURES = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "variantType"})
_PARTITION = "partition."


def delta_source(config: SourceConfig) -> ImageRows | TableSource:
    """The rows of a Delta table, `TABLE` or `TABLE@VERSION`; the latest version is decided when this is called."""
    files = DeltaFiles(config.uri)
    return source_of_rows(config, files, PARQUET, files.schema)


class DeltaFiles(VersionFiles["DeltaTable"]):
    """The files of one version of a table."""

    def __init__(self, uri: str) -> None:
        super().__init__(*split_version(uri), PARQUET_SUFFIXES, _opened)
        self.uri = f"{self.store.uri}@{self._table.version()}"

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return pa.schema(self._table.schema().to_arrow())

    def find(self) -> FoundFiles:
        """The version's files, sorted by path; other files of the folder are those of other versions."""
        return FoundFiles(files_of_version(self.store, "", self._values, self.uri, "VACUUM"), ())

    def columns_of(self, path: str) -> Mapping[str, str | None]:
        """Its partition values, which no file holds."""
        return self._values[path]

    @cached_property
    def _values(self) -> dict[str, dict[str, str | None]]:
        """Partition values of each file, by its path."""
        actions = pa.table(_actions(self._table, self.uri))
        names = [name for name in actions.column_names if name.startswith(_PARTITION)]
        values = {name.removeprefix(_PARTITION): actions.column(name).cast(pa.string()).to_pylist() for name in names}
        # The log holds URIs: a space in a folder's name is `%20` there.
        paths = [unquote(path) for path in actions.column("path").to_pylist()]
        if outside := next((path for path in paths if "://" in path or path.startswith("/")), None):
            raise UsageError(
                f"the Delta table {self.uri} has files elsewhere, such as {printable(outside)}",
                "expected all files in its folder, unlike those of a shallow clone",
                "name the table that was cloned",
            )
        return {path: {name: of[place] for name, of in values.items()} for place, path in enumerate(paths)}


def _opened(uri: str, version: int | None) -> DeltaTable:
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError, TableNotFoundError

    named = uri if version is None else f"{uri}@{version}"
    try:
        table = DeltaTable(uri)
        if version is not None and version > table.version():
            raise UsageError(
                f"the Delta table {uri} has no version {version}", f"its latest is {table.version()}",
                "correct source.uri",
            )  # fmt: skip
        if version is not None:
            table.load_as_version(version)
    except TableNotFoundError as error:
        raise UsageError(
            f"there is no Delta table at {uri}", "expected a folder with _delta_log", "check source.uri"
        ) from error
    except (DeltaError, OSError) as error:
        raise _unreadable(named, error) from error
    unknown = sorted(_needed_features(table) - _HARMLESS_FEATURES)
    if unknown:
        raise UsageError(
            f"the Delta table {named} needs readers that know {', '.join(unknown)}",
            "expected rows and column names as the Parquet files hold them",
            "rewrite the table without (deletion vectors: REORG TABLE ... APPLY (PURGE), then drop the feature)",
        )
    return table


def _actions(table: DeltaTable, named: str) -> Any:
    from deltalake.exceptions import DeltaError

    try:
        return table.get_add_actions(flatten=True)
    except (DeltaError, OSError) as error:
        raise _unreadable(named, error) from error


def _unreadable(named: str, error: Exception) -> StorageError:
    return StorageError(
        f"the Delta table {named} cannot be opened: {error}", "expected a readable log",
        "check that version, and the variables by which delta-rs reaches its store (docs/sources.md#delta)",
    )  # fmt: skip


def _needed_features(table: DeltaTable) -> set[str]:
    """What readers of the table have to know. Protocol 2, from before features had names, is the mapping of columns."""
    is_mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    return {*(table.protocol().reader_features or ()), *(["columnMapping"] if is_mapped else [])}
