"""What a listing takes from rows whoever holds them: keys, splits, groups, labels and values of tables, and of Parquet
files with images.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import as_names, as_splits, or_else
from etl.sources.extra import ExtraColumns
from etl.sources.labels import as_labels
from etl.sources.names import SPLIT_OF_NAME
from etl.sources.target import class_names_of


class ChosenColumns(Protocol):
    """A file's own names; None for what it lacks."""

    @property
    def label(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...
    @property
    def key(self) -> str | None: ...
    @property
    def group(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns of a listing that rows decide."""

    columns: dict[str, pa.Array]
    """`split`, `group`, `label` and `extra`, as far as there are any."""
    keys: pa.Array | None
    """None without a column of keys."""
    problems: pa.Array
    """Why a row is refused, null if it is not."""


def row_columns(
    rows: pa.Table, chosen: ChosenColumns, where: str, extra: ExtraColumns, masks: pa.Array | None
) -> RowColumns:
    """`where`: the file, for a person; `masks`: what stands for the mask of each row."""
    columns: dict[str, pa.Array] = {}
    keys, problems = None, pa.nulls(rows.num_rows, pa.string())

    def labels(name: str) -> pa.Array:
        return as_labels(column_of(rows, name), class_names_of(rows.schema, name), where).combine_chunks()

    if chosen.key is not None:
        keys = as_names(column_of(rows, chosen.key)).combine_chunks()
        problems = or_else(problems, keys.is_null(), "no key")
    if chosen.split is not None:
        columns["split"], is_unknown = as_splits(labels(chosen.split))
        problems = or_else(problems, is_unknown, f"no split's name; expected one of {', '.join(SPLIT_OF_NAME)}")
    if chosen.group is not None:
        columns["group"] = as_names(column_of(rows, chosen.group)).combine_chunks()
    if chosen.label is not None and extra.target is None:
        columns["label"] = labels(chosen.label)
        problems = or_else(problems, columns["label"].is_null(), "no label")
    if extra.has_values:
        columns["extra"], odd = extra.of_rows(rows, where, chosen.label, masks)
        problems = pc.coalesce(problems, odd)
    return RowColumns(columns, keys, problems)


def column_of(rows: pa.Table, name: str) -> pa.ChunkedArray:
    """A block of JSON lines may lack a column that the first one has."""
    return rows.column(name) if name in rows.column_names else pa.chunked_array([pa.nulls(len(rows), pa.string())])
