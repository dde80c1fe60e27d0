"""Chooses the columns of a table and their roles; columns of JSON lines appear only row by row."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import pyarrow as pa

from etl.sources.columns import choose_column, choose_label_column
from etl.sources.containers import is_named
from shardmill.errors import UsageError
from shardmill.printable import printable

if TYPE_CHECKING:
    from etl.config import SourceConfig

URI_COLUMNS = ("uri", "url", "path", "file_name", "filename")
LABEL_COLUMNS = ("label", "labels", "class")
_ID_HINT = "; image ids are not URIs: write paths with their suffixes, such as images/ID.jpg"
_HEADER_HINT = "; a CSV file needs a header line, such as uri,label"


@dataclass(frozen=True, slots=True)
class TableColumns:
    """The table's own names of what we take from it; None for what it lacks."""

    uri: str
    label: str | None
    split: str | None
    key: str | None
    group: str | None
    mask: str | None
    size_bytes: str | None
    mtime_ns: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for field in fields(self) if (name := getattr(self, field.name)) is not None)


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
        new = [name for name in rows.column_names if name not in self._names and _has_values(rows.column(name))]
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


def _has_values(column: pa.ChunkedArray) -> bool:
    return column.null_count < len(column)


def _choose_columns(config: SourceConfig, names: Sequence[str], table: str) -> TableColumns:
    uri = choose_column(names, config.uri_field, URI_COLUMNS, "uri_field")
    is_text = is_named(table, (".csv", ".csv.gz", ".tsv", ".tsv.gz"))
    if uri is None:
        raise UsageError(
            f"the table {table} has the columns {', '.join(names[:20])}",
            f"expected a column of URIs, called {' or '.join(URI_COLUMNS)}",
            f"name it with source.uri_field{_HEADER_HINT if is_text else ''}{_ID_HINT if _has_ids(names) else ''}",
        )
    return TableColumns(
        uri=uri,
        label=choose_label_column(names, config, LABEL_COLUMNS),
        split=choose_column(names, config.split_field, ("split",), "split_field"),
        key=choose_column(names, config.key_field, ("key",), "key_field"),
        group=choose_column(names, config.group_field, ("group",), "group_field"),
        mask=choose_column(names, config.mask_field, (), "mask_field"),
        size_bytes=choose_column(names, "", ("size_bytes",), ""),
        mtime_ns=choose_column(names, "", ("mtime_ns",), ""),
    )


def _has_ids(names: Sequence[str]) -> bool:
    return any(re.fullmatch(r"id|.*([_ ]id|Id|ID)", name) for name in names)
