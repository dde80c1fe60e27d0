"""An Iceberg table as a source: the Parquet files of one snapshot as its manifests list them, without deleted rows.

The manifests are read by the table's own library, from our stores. A column is known by its id, as in every reader of
Iceberg: files keep the names that were in use when they were written.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.containers import FoundFiles, VersionFiles, files_of_version
from etl.sources.kinds.parquet import ParquetFile
from etl.sources.kinds.table import TableSource, source_of_rows
from etl.sources.names import ICEBERG_SUFFIXES, PARQUET_SUFFIXES
from etl.sources.row_file import RowFormat, RowImage
from etl.sources.rows import ImageRows
from shardmill.dataset.versions import split_version
from shardmill.errors import NoSuchRoot, ShardmillError, StorageError, UsageError
from shardmill.storage import Store, StoredFile, join_uri
from shardmill.stores import open_store
from shardmill.words import printable

if TYPE_CHECKING:
    from pyiceberg.manifest import FileFormat
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask
    from pyiceberg.table.metadata import TableMetadata

    from etl.config import SourceConfig


_CATALOG, _METADATA, _HINT = "iceberg://", "metadata", "metadata/version-hint.text"
_FIELD_ID = b"PARQUET:field_id"
# A snapshot that the newest metadata files do not know has expired. Two writers may have tried for one number.
_NUM_LOOKED_AT = 5


def iceberg_source(config: SourceConfig) -> ImageRows | TableSource:
    """The rows of an Iceberg table; the snapshot is decided when this is called."""
    files = IcebergFiles(config.uri)
    return source_of_rows(config, files, RowFormat("Parquet", PARQUET_SUFFIXES, files.open_file), files.schema)


def claims(uri: str) -> bool:
    """Whether a file is a table's metadata, by the folder that it is in."""
    return uri.split("/")[-2:-1] == [_METADATA]


class IcebergFiles(VersionFiles["IcebergTable"]):
    """The files of one snapshot of a table, which every form of its URI leads to: the folder and the snapshot's id."""

    def __init__(self, uri: str) -> None:
        folder, snapshot_id = _pinned(uri)
        super().__init__(folder, snapshot_id, PARQUET_SUFFIXES, _opened)
        self.uri = f"{self.store.uri}@{snapshot_id}"

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        return self._table.columns

    def find(self) -> FoundFiles:
        """The snapshot's files, sorted by path; other files of the folder are metadata, or those of other snapshots."""
        return FoundFiles(files_of_version(self.store, "", self._table.tasks, self.uri, "expire_snapshots"), ())

    def open_file(self, stream: BinaryIO, file: StoredFile) -> IcebergFile:
        """The rows of a file that are not deleted."""
        return IcebergFile(ParquetFile(stream, file), self._table, self._table.tasks[file.path], file.path)


@dataclass(frozen=True, eq=False)
class IcebergTable:
    """One snapshot."""

    schema: Schema
    columns: pa.Schema
    """The same in Arrow's types."""
    metadata: TableMetadata
    tasks: Mapping[str, FileScanTask]
    """By the path of the data file below the table's folder."""
    stored: _TableStore

    def constants_of(self, task: FileScanTask) -> dict[int, Any]:
        """Id -> value of the columns that a file need not hold, because it has one value in them."""
        defaults = {field.field_id: field.initial_default for field in self.schema.fields}
        spec = self.metadata.specs()[task.file.spec_id]
        places = {
            field.source_id: place for place, field in enumerate(spec.fields) if str(field.transform) == "identity"
        }
        return defaults | {number: task.file.partition[place] for number, place in places.items()}

    def ids_of(self, schema: pa.Schema) -> dict[int, pa.Field]:
        """Id -> column of a file. Files that were written without ids have them by the table's mapping of names."""
        mapping = self.metadata.name_mapping()
        by_name = {} if mapping is None else {name: field.field_id for field in mapping.root for name in field.names}
        ids = {field.name: int((field.metadata or {}).get(_FIELD_ID, by_name.get(field.name, -1))) for field in schema}
        return {ids[field.name]: field for field in schema if ids[field.name] >= 0}


class IcebergFile:
    """One Parquet file with the columns that the table has."""

    def __init__(self, parquet: ParquetFile, table: IcebergTable, task: FileScanTask, path: str) -> None:
        self._parquet, self.num_rows = parquet, parquet.num_rows
        stored, constants, fields = table.ids_of(parquet.schema), table.constants_of(task), []
        self._stored: dict[str, str] = {}
        self._constants: dict[str, pa.Scalar] = {}
        for column, of_table in zip(table.columns, table.schema.fields, strict=True):
            own = stored.get(of_table.field_id)
            if own is None:
                self._constants[column.name] = pa.scalar(constants[of_table.field_id], column.type)
                fields.append(column)
                continue
            _check_inner_names(own.type, table.schema, f"the column {printable(own.name)} of {printable(path)}")
            self._stored[column.name] = own.name
            fields.append(pa.field(column.name, _grown(own.type, column.type)))
        self.schema = pa.schema(fields, parquet.schema.metadata)
        nothing = np.empty(0, np.int64)
        deletes = (_deletes_in(table.stored, each.file_path, each.file_format) for each in task.delete_files)
        self._deleted_N = np.concatenate([nothing, *(each.get(task.file.file_path, nothing) for each in deletes)])

    def batches(self, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Rows keep their numbers in the file when others of it are deleted."""
        stored = [self._stored[name] for name in names if name in self._stored]
        for rows, places_N, blocks_N in self._parquet.batches(stored):
            columns = {name: self._column(rows, name) for name in names} or {"": pa.nulls(rows.num_rows)}
            table = pa.table(columns).replace_schema_metadata(self.schema.metadata)
            is_left_N = ~np.isin(places_N, self._deleted_N)
            yield table.filter(pa.array(is_left_N)), places_N[is_left_N], blocks_N[is_left_N]

    def _column(self, rows: pa.Table, name: str) -> pa.ChunkedArray | pa.Array:
        if name in self._constants:
            return pa.repeat(self._constants[name], rows.num_rows)
        column, wanted = rows.column(self._stored[name]), self.schema.field(name).type
        # A text may have been read as a dictionary, which no column of numbers is.
        return column.cast(wanted) if pa.types.is_integer(wanted) or pa.types.is_floating(wanted) else column

    def images(self, leaf: str) -> Callable[[int], RowImage]:
        """Those of a file from before the column was added are none."""
        name = leaf if leaf in self.schema.names else leaf.removesuffix(".bytes")
        if name in self._constants:
            return lambda _: None
        return self._parquet.images(self._stored[name] + leaf.removeprefix(name))


class _TableStore:
    """What pyiceberg reads files by: those below the table's location, wherever the folder is now."""

    def __init__(self, store: Store, location: str) -> None:
        self._store, self._location = store, _without_scheme(location).rstrip("/") + "/"

    def path_of(self, location: str) -> str:
        """A file's path below the table's folder. Raises UsageError if it is elsewhere."""
        full = _without_scheme(location)
        if not full.startswith(self._location) or ".." in full.split("/"):
            raise UsageError(
                f"the Iceberg table {self._store.uri} has files elsewhere, such as {printable(location)}",
                f"expected all of them below its location {printable(self._location)}",
                "rewrite the table without write.data.path and write.metadata.path",
            )
        return full.removeprefix(self._location)

    def new_input(self, location: str) -> _Input:
        """pyiceberg's `FileIO`."""
        return _Input(location, lambda: self._store.read(self.path_of(location)))


@dataclass(frozen=True)
class _Input:
    """pyiceberg's `InputFile`."""

    location: str
    read: Callable[[], bytes]

    def open(self, seekable: bool = True) -> io.BytesIO:
        """Manifests are small."""
        return io.BytesIO(self.read())


def _pinned(uri: str) -> tuple[str, int]:
    """The table's folder and a snapshot's id, of `FOLDER`, a metadata file or `iceberg://CATALOG/NAMESPACE.TABLE`, each
    perhaps with `@SNAPSHOT`; the current snapshot is asked for now.
    """
    table, snapshot_id = split_version(uri)
    file = _file_in_catalog(table) if table.startswith(_CATALOG) else table
    folder, name = (file, "") if not file.endswith(ICEBERG_SUFFIXES) else _folder_of(file)
    if snapshot_id is None:
        store = open_store(folder)
        with _reading(table):
            snapshot_id = _metadata(store, f"{_METADATA}/{name}" if name else _hinted(store)).current_snapshot_id
    if snapshot_id is None:
        raise UsageError(f"the table {table} is empty", "expected rows", "name another table")
    return folder, snapshot_id


def _folder_of(file: str) -> tuple[str, str]:
    """The table's folder of a metadata file, and the file's name."""
    *folder, metadata, name = ("", *file.split("/"))
    if metadata != _METADATA:
        raise UsageError(f"{file} is not in a folder {_METADATA}", "expected TABLE/metadata/NAME", "check source.uri")
    return "/".join(folder[1:]) or ".", name


def _file_in_catalog(uri: str) -> str:
    """The table's current metadata file."""
    from pyiceberg.catalog import list_catalogs, load_catalog
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, NotInstalledError

    catalog, _, table = uri.removeprefix(_CATALOG).partition("/")
    if not catalog or "." not in table:
        raise UsageError(f"{uri} is no table", f"expected {_CATALOG}CATALOG/NAMESPACE.TABLE", "correct source.uri")
    # Names of environment variables have no case, and so pyiceberg's names of catalogs have none.
    known = list_catalogs()
    if catalog.lower() not in known:
        raise UsageError(
            f"pyiceberg has no settings of a catalog {catalog}",
            f"expected one of {', '.join(sorted(known))}" if known else "there are none of any catalog here",
            "correct source.uri, .pyiceberg.yaml or PYICEBERG_CATALOG__NAME__URI (docs/sources.md#iceberg)",
        )
    try:
        return load_catalog(catalog).load_table(table).metadata_location
    except (NoSuchTableError, NoSuchNamespaceError) as error:
        raise UsageError(f"the catalog {catalog} has no table {table}", "", "correct source.uri") from error
    except (NotInstalledError, ImportError) as error:
        raise UsageError(
            f"the catalog {catalog} needs a package: {_first_line(error)}",
            "not installed here",
            "install the extra of pyiceberg for this kind of catalog, such as `pip install 'pyiceberg[sql-sqlite]'`",
        ) from error
    except Exception as error:
        raise StorageError(
            f"the catalog {catalog} cannot be asked for {table}: {_first_line(error)}",
            "expected an answer at the address in pyiceberg's settings",
            f"`pyiceberg --catalog {catalog} list` tries them (docs/sources.md#iceberg)",
        ) from error


def _opened(folder: str, snapshot_id: int | None) -> IcebergTable:
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.manifest import FileFormat
    from pyiceberg.table import DataScan

    assert snapshot_id is not None, "_pinned has found one"
    store, named = open_store(folder), f"{folder}@{snapshot_id}"
    with _reading(named):
        newest = (_metadata(store, path) for path in _metadata_files(store)[:_NUM_LOOKED_AT])
        metadata = next((each for each in newest if each.snapshot_by_id(snapshot_id) is not None), None)
        if metadata is None:
            raise UsageError(
                f"the Iceberg table {folder} has no snapshot {snapshot_id}", "expected one that has not expired",
                "correct source.uri",
            )  # fmt: skip
        stored = _TableStore(store, metadata.location)
        scan = DataScan(metadata, cast(Any, stored), snapshot_id=snapshot_id)
        tasks, schema = {stored.path_of(task.file.file_path): task for task in scan.plan_files()}, scan.projection()
        columns = schema_to_pyarrow(schema, include_field_ids=False)
    other = next((path for path, task in tasks.items() if task.file.file_format != FileFormat.PARQUET), None)
    if other is not None:
        raise UsageError(f"the Iceberg table {named} holds {other}", "expected Parquet files", "rewrite the table")
    return IcebergTable(schema, columns, metadata, tasks, stored)


@contextmanager
def _reading(named: str) -> Iterator[None]:
    """Whatever pyiceberg raises for metadata that it cannot read, in one line."""
    try:
        yield
    except ShardmillError:
        raise
    except Exception as error:
        if "equality deletes" in str(error):
            raise UsageError(
                f"the Iceberg table {named} has rows that are deleted by equality, as Flink deletes them",
                "expected no deletes, or deletes by position",
                "rewrite its files first (Spark: CALL system.rewrite_data_files)",
            ) from error
        raise StorageError(
            f"the Iceberg table {named} cannot be opened: {_first_line(error)}", "expected readable metadata",
            "check the snapshot, and that its metadata has not been deleted",
        ) from error  # fmt: skip


def _metadata(store: Store, path: str) -> TableMetadata:
    from pyiceberg.serializers import FromInputFile

    return FromInputFile.table_metadata(cast(Any, _Input(path, lambda: store.read(path))))


def _metadata_files(store: Store) -> list[str]:
    """Their paths, newest first. Raises UsageError if there is none."""
    try:
        found = [file.path for file in store.list(_METADATA) if file.path.endswith(ICEBERG_SUFFIXES)]
    except NoSuchRoot:
        found = []
    if not found:
        raise UsageError(
            f"there is no Iceberg table at {store.uri}", "expected a folder with metadata/*.metadata.json",
            "check source.uri",
        )  # fmt: skip
    return sorted(found, key=lambda path: (_number(path), path), reverse=True)


def _number(path: str) -> int:
    """Of `v3.metadata.json`, or of `00003-UUID.metadata.json`, which is a name that any writer may have tried for."""
    found = re.match(r"v?(\d+)", path.removeprefix(f"{_METADATA}/"))
    return int(found[1]) if found else -1


def _hinted(store: Store) -> str:
    """The current metadata file of a table without a catalog. Raises UsageError if only a catalog knows it."""
    files = _metadata_files(store)
    try:
        hint = store.read(_HINT).decode().strip().removesuffix(".metadata.json").removeprefix("v")
    except FileNotFoundError:
        hint = ""
    of_hint = [path for path in files if path == f"{_METADATA}/{hint}.metadata.json" or str(_number(path)) == hint]
    if not of_hint:
        raise UsageError(
            f"which metadata of {store.uri} is current is known to its catalog",
            f"expected {_HINT}, which a table without a catalog has",
            f"name the table as {_CATALOG}CATALOG/NAMESPACE.TABLE, or a metadata file; the newest is "
            + join_uri(store.uri, files[0]),
        )
    return of_hint[0]


@lru_cache(maxsize=8)
def _deletes_in(stored: _TableStore, location: str, file_format: FileFormat) -> dict[str, np.ndarray]:
    """Location of a data file -> numbers of its rows that one file of deletes names, int64. One may be for many."""
    from pyiceberg.manifest import FileFormat
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    data = stored.new_input(location).read()
    if file_format == FileFormat.PUFFIN:
        vectors = deletion_vectors_from_puffin_file(PuffinFile(data))
        return {each.referenced_data_file: each.to_vector().to_numpy().astype(np.int64) for each in vectors}
    rows = pq.read_table(pa.BufferReader(data), columns=["file_path", "pos"])
    by_file = rows.group_by("file_path").aggregate([("pos", "list")])
    places = (each.values.to_numpy() for each in by_file.column("pos_list"))
    return dict(zip(by_file.column("file_path").to_pylist(), places, strict=True))


def _grown(stored: pa.DataType, wanted: pa.DataType) -> pa.DataType:
    """A file's type, or the table's if it is a larger one: a column of numbers may have grown since."""
    is_larger = (stored, wanted) in ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))
    return wanted if is_larger else stored


def _check_inner_names(kind: pa.DataType, schema: Schema, where: str) -> None:
    """Raise UsageError if fields inside a column have other names than in the table: they are read by their names."""
    if not pa.types.is_nested(kind):
        return
    for place in range(kind.num_fields):
        field = kind.field(place)
        if pa.types.is_struct(kind) and field.metadata and _FIELD_ID in field.metadata:
            name = (schema.find_column_name(int(field.metadata[_FIELD_ID])) or "").rpartition(".")[2]
            if name != field.name:
                raise UsageError(
                    f"{where} has a field {printable(field.name)} that the table has renamed or dropped",
                    "expected fields of columns as the table names them", "rewrite its files",
                )  # fmt: skip
        _check_inner_names(field.type, schema, where)


def _without_scheme(location: str) -> str:
    """`s3a://b/x` and `s3://b/x` are one place, and so are `file:/x`, `file:///x` and `/x`."""
    return "/" + re.sub(r"^[A-Za-z0-9+.-]+:/", "", location).lstrip("/")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
