"""A table of `uri,label[,split][,key]`, processed by columns, so that ten million rows are listed in seconds."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import (
    are_inexact,
    as_texts,
    choose_column,
    choose_label_column,
    listed_rows,
    misspelt,
    or_else,
    unread_coordinates,
    value_texts,
    whole_texts,
    with_constants,
)
from etl.sources.containers import Containers, is_named
from etl.sources.extra import ExtraColumns
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import TABLE_SUFFIXES
from etl.sources.path_labels import look_alikes, with_warnings
from etl.sources.row_file import RowFormat, bytes_leaf
from etl.sources.rows import LABEL_COLUMNS, ChosenColumns, ImageRows, column_of, row_columns, usual_columns
from etl.sources.table_rows import read_rows
from etl.sources.unused_labels import column_hints
from etl.sources.uris import PathStyle, UriReader, beside, uri_problems, without_dots
from shardmill.errors import UsageError
from shardmill.storage import Store, StoredFile
from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, Rejection
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import SourceConfig


URI_COLUMNS = ("uri", "url", "path", "file_name", "filename")
_ID_HINT = "; image ids are not URIs: write paths with their suffixes, such as images/ID.jpg"
_HEADER_HINT = "; a CSV file needs a header line, such as uri,label"


@dataclass(frozen=True, slots=True)
class TableColumns(ChosenColumns):
    """With those of a table of URIs."""

    uri: str
    mask: str | None
    size_bytes: str | None
    mtime_ns: str | None


class ColumnChoice:
    """The choice for one table. The first rows decide it; rows that would change it are refused, not misread."""

    def __init__(self, config: SourceConfig, table: str) -> None:
        self._config, self._table = config, table
        self._names: list[str] = []
        self._chosen: TableColumns | None = None
        # Each line of JSON has names of its own.
        self._has_header = not is_named(table, (".jsonl", ".jsonl.gz", ".ndjson", ".ndjson.gz"))

    def look(self, rows: pa.Table, first_row: int) -> tuple[TableColumns, tuple[str, ...]]:
        """The columns to use for rows from number `first_row` on, and the names that no row before them had.

        Raises UsageError if the table has no column of URIs, or a column comes too late to be used.
        """
        if self._chosen is None:
            self._names = list(rows.column_names)
            self._chosen = self._choose()
            return self._chosen, tuple(self._names)
        new = [
            name for name in rows.column_names if name not in self._names and rows.column(name).null_count < len(rows)
        ]
        if new:
            self._names += new
            self._check_unchanged(rows, first_row)
        return self._chosen, tuple(new)

    def check_all_found(self) -> None:
        """Raise UsageError if the config names a column that no row of the table had."""
        if self._chosen is not None:
            _choose_columns(self._config, self._names, self._table)

    def _choose(self) -> TableColumns:
        names, config = list(self._names), self._config
        if not self._has_header:
            # A column that the config names may come with any row.
            known = {name.strip().lower() for name in names}
            named = (config.label_field, config.split_field, config.key_field, config.group_field, config.mask_field)
            names += [name for name in named if name and name.strip().lower() not in known]
        return _choose_columns(config, names, self._table)

    def _check_unchanged(self, rows: pa.Table, first_row: int) -> None:
        chosen = self._choose()
        for field in fields(TableColumns):
            name = getattr(chosen, field.name)
            if name == getattr(self._chosen, field.name):
                continue
            row = first_row + next(place for place, value in enumerate(rows.column(name)) if value.is_valid)
            setting = f"{field.name}_field"
            fix = "write it in the first row too, null if there is none"
            if getattr(self._config, setting, None) == "":
                fix = f"set source.{setting}={name}, or {fix}"
            raise UsageError(
                f"row {row} of the table {printable(self._table)} is the first with the key {printable(name)!r}, and "
                "earlier rows were listed without it",
                "expected all used keys in the first rows, or set in the config",
                fix,
            )


def _choose_columns(config: SourceConfig, names: Sequence[str], table: str) -> TableColumns:
    uri = choose_column(names, config.uri_field, URI_COLUMNS, "uri_field")
    is_text = is_named(table, (".csv", ".csv.gz", ".tsv", ".tsv.gz"))
    if uri is None:
        has_ids = any(re.fullmatch(r"id|.*([_ ]id|Id|ID)", name) for name in names)
        raise UsageError(
            f"the table {table} has the columns {', '.join(names[:20])}",
            f"expected a column of URIs, called {' or '.join(URI_COLUMNS)}",
            f"name it with source.uri_field{_HEADER_HINT if is_text else ''}{_ID_HINT if has_ids else ''}",
        )
    return TableColumns(
        uri=uri,
        label=choose_label_column(names, config, LABEL_COLUMNS),
        **usual_columns(names, config),
        mask=choose_column(names, config.mask_field, (), "mask_field"),
        size_bytes=choose_column(names, "", ("size_bytes",), ""),
        mtime_ns=choose_column(names, "", ("mtime_ns",), ""),
    )


class TableSource:
    """The images that a table names, one in each row. They are files of their own, and none is touched by a listing.

    So their sizes and times are unknown until they are read, unless the table has columns `size_bytes` and `mtime_ns`.
    """

    def __init__(
        self, config: SourceConfig, tables: Containers | None = None, row_format: RowFormat | None = None
    ) -> None:
        """`row_format`: that of the files, if it is not one of those that their names indicate."""
        self._config = config.without_box_labels
        self._tables = tables or Containers(config.uri, TABLE_SUFFIXES)
        self._format = row_format
        self._extra = ExtraColumns.of_source(config)
        self.uri = self._tables.uri

    def open(self, max_source_bytes: int) -> UriReader:
        """Reads relative URIs below the table's folder."""
        return UriReader(self._tables, max_source_bytes, self._config.download)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no table or it has no column of URIs, IntegrityError if it does not parse."""
        # Other files of the folder are the images.
        tables = self._tables.find().containers
        # `train.csv` alone is no split beside another.
        alike = look_alikes(file.path for file in tables) if len(tables) > 1 else ()
        # Where tables of several folders lead from is one mistake, so one of them is looked at.
        in_folder = next((file for file in tables if "/" in file.path), None)
        batches = itertools.chain.from_iterable(self._list_table(file, file is in_folder) for file in tables)
        yield from with_warnings(batches, alike if len(alike) > 1 else ())

    def _wanted(self) -> dict[str, str]:
        """Columns whose lists and bytes are read, with the types that are given; where one value is expected they are
        refused by name.
        """
        config = self._config
        single = (config.uri_field, config.key_field or "key", config.group_field or "group",
                  config.split_field or "split", config.mask_field, "size_bytes", "mtime_ns")  # fmt: skip
        labels = [config.label_field] if config.label_field else LABEL_COLUMNS
        return dict.fromkeys((*single, *labels), "") | {
            name: self._extra.given.get(name, "") for name in self._extra.own_names
        }

    def _list_table(self, file: StoredFile, looks_beside: bool) -> Iterator[ListingBatch]:
        choice = ColumnChoice(self._config, file.path)
        style = PathStyle(self._tables.store, file.path, looks_beside=looks_beside)
        first_row = 1
        for rows in read_rows(self._tables.store, file, self._wanted(), self._format):
            if isinstance(rows, Rejection):
                yield ListingBatch.of_rejections(rows)
                first_row += 1
                continue
            rows = with_constants(rows, self._tables.columns_of(file.path))
            columns, new_names = choice.look(rows, first_row)
            _check_single(rows, columns, file.path)
            if new_names:
                yield self._hints(rows, columns, new_names, file.path)
            batch = _listed(_Rows(rows, columns, file.path, first_row), style, self._tables.store, self._extra)
            yield replace(batch, extra_types=self._extra.types)
            first_row += rows.num_rows
        choice.check_all_found()

    def _hints(self, rows: pa.Table, columns: TableColumns, names: Sequence[str], table: str) -> ListingBatch:
        """Find hints at labels in unused columns, by their names and by the values of a table's first rows."""
        used = {"split": columns.split, "group": columns.group}
        warnings, hints = misspelt(names, used, table), ()
        if not self._config.boxes.field:
            warnings += unread_coordinates(names, (*columns.names, *self._extra.own_names), table)
        if columns.label is None and self._config.label_kind == "class":
            unused = set(names) - {*columns.names, *self._extra.own_names}
            # Of a column that comes later, values beside those of earlier rows say nothing.
            first_rows = rows if len(names) == rows.num_columns else rows.slice(0, 0)
            hints = column_hints(rows.schema, unused, first_rows, table)
        return ListingBatch(LISTED_SCHEMA.empty_table(), warnings=warnings, label_hints=hints)


@dataclass(frozen=True, slots=True)
class _Rows:
    """One batch of a table."""

    rows: pa.Table
    columns: TableColumns
    table: str
    first_row: int

    def texts(self, name: str) -> pa.Array:
        return as_texts(column_of(self.rows, name)).combine_chunks()

    def numbers(self, name: str, default: int) -> tuple[pa.Array, pa.Array]:
        """Whole numbers from 0 on, `default` for none; and which cells hold anything else."""
        column = column_of(self.rows, name)
        texts = value_texts(column)
        assert texts is not None, "_check_single has refused it"
        texts = pc.fill_null(whole_texts(texts).combine_chunks(), "")
        is_exact = pc.invert(are_inexact(column)).combine_chunks()
        is_number = pc.and_(pc.match_substring_regex(texts, r"^\d{1,18}$"), is_exact)
        is_empty = pc.equal(texts, "")
        numbers = pc.if_else(is_number, texts, pa.scalar(None, pa.string())).cast(pa.int64())
        return pc.fill_null(numbers, default), pc.invert(pc.or_(is_number, is_empty))


def _check_single(rows: pa.Table, columns: TableColumns, table: str) -> None:
    """Raises UsageError for a column of lists or bytes where each row needs one value."""
    for name in (columns.key, columns.group, columns.split, columns.mask, columns.size_bytes, columns.mtime_ns):
        if name is not None and value_texts(column_of(rows, name).slice(0, 0)) is None:
            raise UsageError(
                f"the column {printable(name)} of the table {printable(table)} is {rows.schema.field(name).type}",
                "expected one text or number in each row",
                "write it so, or rename the column if it means something else",
            )


def _listed(batch: _Rows, style: PathStyle, store: Store, extra: ExtraColumns) -> ListingBatch:
    """One batch of rows as a part of the listing."""
    chosen, num_rows = batch.columns, batch.rows.num_rows
    uris = without_dots(style.as_paths(batch.texts(chosen.uri)))
    problems, masks = uri_problems(uris, store), None
    if chosen.mask is not None:
        masks = without_dots(style.as_paths(batch.texts(chosen.mask)))
        problems = pc.coalesce(or_else(problems, masks.is_null(), "no mask"), uri_problems(masks, store))
        masks = beside(masks, batch.table)
    found = row_columns(batch.rows, chosen, batch.table, extra, masks)
    problems = pc.coalesce(problems, found.problems)
    uris = beside(uris, batch.table)
    places = pa.array(np.arange(batch.first_row, batch.first_row + num_rows, dtype=np.int64))
    columns: dict[str, pa.Array] = {"key": uris, "place": places, **found.columns}
    if found.keys is not None:
        # Rows with a key of their own may name one file, which each of them reads whole.
        blocks = pa.repeat(pa.scalar(NO_BLOCK, pa.int64()), num_rows)
        columns |= {"key": found.keys, "container": uris, "block": blocks}
    if chosen.size_bytes is not None:
        columns["size_bytes"], is_odd = batch.numbers(chosen.size_bytes, UNKNOWN_SIZE)
        problems = or_else(problems, is_odd, "size_bytes is no whole number")
    if chosen.mtime_ns is not None:
        columns["mtime_ns"], is_odd = batch.numbers(chosen.mtime_ns, 0)
        problems = or_else(problems, is_odd, "mtime_ns is no whole number")
    return listed_rows(columns, problems, batch.table)


def source_of_rows(
    config: SourceConfig, files: Containers, row_format: RowFormat, schema: pa.Schema
) -> ImageRows | TableSource:
    """Of a table whose rows hold the images, or name them; `schema` tells which."""
    is_named = bool(config.uri_field) and not config.image_field
    holds = config.image_field or (not is_named and any(bytes_leaf(field) is not None for field in schema))
    return (ImageRows if holds else TableSource)(config, files, row_format)
