"""A table of `uri,label[,split][,key]`: columns from end to end, so that ten million rows are listed in seconds."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.columns import (
    as_splits,
    as_texts,
    choose_column,
    choose_label_column,
    listed_rows,
    misspelt,
    or_else,
)
from etl.sources.containers import Containers, is_named
from etl.sources.extra import ExtraColumns
from etl.sources.label_signs import column_signs
from etl.sources.labels import as_labels
from etl.sources.names import SPLIT_OF_NAME, TABLE_SUFFIXES
from etl.sources.path_style import PathStyle
from etl.sources.table_rows import read_rows
from etl.sources.target import class_names_of
from etl.sources.uris import UriReader, uri_problems, without_dots
from shardmill.errors import UsageError
from shardmill.storage import Store, StoredFile
from shardmill.typed_columns import LABEL
from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, Rejection

if TYPE_CHECKING:
    from etl.config import SourceConfig

_URI_COLUMNS = ("uri", "url", "path", "file_name", "filename")
_LABEL_COLUMNS = ("label", "labels", "class")
_ID_HINT = "; ids of images are no URIs: write paths with their suffixes, such as images/ID.jpg"
_HEADER_HINT = "; without a line of names at its head, a CSV file needs one, such as uri,label"


class TableSource:
    """The images that a table names, one in each row. They are files of their own, and none is touched by a listing.

    So their sizes and times are unknown until they are read, unless the table has columns `size_bytes` and `mtime_ns`.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._tables = Containers(config.uri, TABLE_SUFFIXES)
        self._extra = ExtraColumns(config.extra_columns, config.label_kind)
        self.uri = self._tables.uri

    def open(self, max_source_bytes: int) -> UriReader:
        """Reads relative URIs below the table's folder."""
        return UriReader(self._tables, max_source_bytes, self._config.download)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no table or it has no column of URIs, IntegrityError if it does not parse."""
        # Other files of the folder are the images.
        for file in self._tables.find().containers:
            yield from self._list_table(file)

    def _wanted(self) -> dict[str, str]:
        """Columns whose lists are read, with the types that are given."""
        if self._extra.target is None:
            # A list where a URI is expected is refused by name.
            return {self._config.uri_field: ""} | self._extra.given
        labels = dict.fromkeys([self._config.label_field] if self._config.label_field else _LABEL_COLUMNS, "")
        return labels | {name: kind for name, kind in self._extra.given.items() if name != LABEL}

    def _list_table(self, file: StoredFile) -> Iterator[ListingBatch]:
        columns: _Columns | None = None
        style = PathStyle(self._tables.store, file.path)
        first_row = 1
        for rows in read_rows(self._tables.store, file, self._wanted()):
            if isinstance(rows, Rejection):
                yield ListingBatch(LISTED_SCHEMA.empty_table(), (rows,))
                first_row += 1
                continue
            if columns is None:
                columns = _choose_columns(self._config, rows.column_names, file.path)
                yield self._signs(rows, columns, file.path)
            batch = _listed(_Rows(rows, columns, file.path, first_row), style, self._tables.store, self._extra)
            yield replace(batch, extra_types=self._extra.types)
            first_row += rows.num_rows

    def _signs(self, rows: pa.Table, columns: _Columns, table: str) -> ListingBatch:
        """What the names and values of a table's first rows show of columns that are not used."""
        used = {"split": columns.split, "group": columns.group}
        warnings, signs = misspelt(rows.column_names, used, table), ()
        if columns.label is None and self._config.label_kind == "class":
            unused = set(rows.column_names) - {*columns.names, *self._extra.given}
            signs = column_signs(rows.schema, unused, rows, table)
        return ListingBatch(LISTED_SCHEMA.empty_table(), warnings=warnings, label_signs=signs)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The table's own names of what we take from it; None for what it lacks."""

    uri: str
    label: str | None
    split: str | None
    key: str | None
    group: str | None
    size_bytes: str | None
    mtime_ns: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in dataclasses.astuple(self) if name is not None)


def _choose_columns(config: SourceConfig, names: list[str], table: str) -> _Columns:
    uri = choose_column(names, config.uri_field, _URI_COLUMNS, "uri_field")
    is_text = is_named(table, (".csv", ".csv.gz", ".tsv", ".tsv.gz"))
    if uri is None:
        raise UsageError(
            f"the table {table} has the columns {', '.join(names[:20])}",
            f"expected one of URIs, called {' or '.join(_URI_COLUMNS)}",
            f"name it with source.uri_field{_HEADER_HINT if is_text else ''}{_ID_HINT if _has_ids(names) else ''}",
        )
    return _Columns(
        uri=uri,
        label=choose_label_column(names, config, _LABEL_COLUMNS),
        split=choose_column(names, config.split_field, ("split",), "split_field"),
        key=choose_column(names, config.key_field, ("key",), "key_field"),
        group=choose_column(names, config.group_field, ("group",), "group_field"),
        size_bytes=choose_column(names, "", ("size_bytes",), ""),
        mtime_ns=choose_column(names, "", ("mtime_ns",), ""),
    )


def _has_ids(names: list[str]) -> bool:
    return any(re.fullmatch(r"id|.*([_ ]id|Id|ID)", name) for name in names)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One batch of a table."""

    rows: pa.Table
    columns: _Columns
    table: str
    first_row: int

    def _column(self, name: str) -> pa.ChunkedArray:
        """A block of JSON lines may lack a column that the first one has."""
        rows = self.rows
        return rows.column(name) if name in rows.column_names else pa.chunked_array([pa.nulls(len(rows), pa.string())])

    def texts(self, name: str) -> pa.Array:
        return as_texts(self._column(name)).combine_chunks()

    def labels(self, name: str) -> pa.Array:
        return as_labels(self._column(name), class_names_of(self.rows.schema, name), self.table).combine_chunks()

    def numbers(self, name: str, default: int) -> tuple[pa.Array, pa.Array]:
        """Whole numbers from 0 on, `default` for none; and which cells hold anything else."""
        texts = pc.fill_null(self._column(name).combine_chunks().cast(pa.string()), "")
        is_number, is_empty = pc.match_substring_regex(texts, r"^\d{1,18}$"), pc.equal(texts, "")
        numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.string())).cast(pa.int64())
        return pc.fill_null(numbers, default), pc.invert(pc.or_(is_number, is_empty))


def _listed(batch: _Rows, style: PathStyle, store: Store, extra: ExtraColumns) -> ListingBatch:
    """One batch of rows as a part of the listing."""
    chosen, num_rows = batch.columns, batch.rows.num_rows
    uris = without_dots(style.as_paths(batch.texts(chosen.uri)))
    problems = uri_problems(uris, store)
    places = pa.array(np.arange(batch.first_row, batch.first_row + num_rows, dtype=np.int64))
    columns: dict[str, pa.Array] = {"key": uris, "place": places}
    if chosen.key is not None:
        names = batch.texts(chosen.key)
        problems = or_else(problems, names.is_null(), "no key")
        # Rows with a key of their own may name one file, which each of them reads whole.
        blocks = pa.repeat(pa.scalar(NO_BLOCK, pa.int64()), num_rows)
        columns |= {"key": pc.binary_join_element_wise(batch.table, names, "\0"), "container": uris, "block": blocks}
    if chosen.split is not None:
        columns["split"], is_unknown = as_splits(batch.labels(chosen.split))
        problems = or_else(problems, is_unknown, f"no split's name; expected one of {', '.join(SPLIT_OF_NAME)}")
    if chosen.group is not None:
        columns["group"] = batch.texts(chosen.group)
    if chosen.label is not None and extra.target is None:
        columns["label"] = batch.labels(chosen.label)
        problems = or_else(problems, columns["label"].is_null(), "no label")
    if chosen.size_bytes is not None:
        columns["size_bytes"], is_odd = batch.numbers(chosen.size_bytes, UNKNOWN_SIZE)
        problems = or_else(problems, is_odd, "size_bytes is no whole number")
    if chosen.mtime_ns is not None:
        columns["mtime_ns"], is_odd = batch.numbers(chosen.mtime_ns, 0)
        problems = or_else(problems, is_odd, "mtime_ns is no whole number")
    if extra.given:
        columns["extra"], odd = extra.of_rows(batch.rows, batch.table, chosen.label)
        problems = pc.coalesce(problems, odd)
    return listed_rows(columns, problems, batch.table)
