"""The metadata of a split as one table, a row per sample: read from the row segments, not from the shards."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pyarrow as pa

from shardmill.dataset.row_segments import LOOK_COLUMNS, read_rows, rows_schema
from shardmill.errors import IntegrityError, UsageError
from shardmill.typed_columns import LABEL, MASK_TYPE, arrow_type, stored_labels

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.formats.rows import RowSchema
    from shardmill.values import ShardFile

CLASS = "class_name"
# What a segment keeps for verification and statistics.
_INTERNAL = {"row_sha256", "channel_sums", "channel_square_sums", *LOOK_COLUMNS, "extra", "listed_extra", LABEL}


def require_pandas(instead: str) -> None:
    """Raises UsageError if it is not installed: no extra has it."""
    if find_spec("pandas") is None:
        raise UsageError("to_pandas needs pandas", "not installed here", f"`pip install pandas`, or use {instead}")


def metadata_columns(schema: RowSchema) -> tuple[str, ...]:
    """The names of the columns of `read_metadata`. An extra column hides one of ours of the same name."""
    own = [name for name in rows_schema(schema).names if name not in _INTERNAL]
    labels = [LABEL, CLASS] if schema.has_class else [LABEL]
    # A segment has the digest of a mask.
    extra = [column.name for column in schema.extra if column.type != MASK_TYPE]
    return (*(name for name in (*own, *labels) if name not in extra), *extra)


def read_metadata(
    dataset: Dataset, split: str, columns: Collection[str] | None = None, max_rows: int | None = None
) -> pa.Table:
    """One row for each of the split, in stored order: `columns`, or all of `metadata_columns`.

    With `max_rows`, the first ones: of the first shards only.

    Raises UsageError for a column that the dataset does not have, IntegrityError for a segment that was altered.
    """
    schema = dataset.manifest.row_schema
    known = metadata_columns(schema)
    check_names("columns", columns)
    wanted = known if columns is None else tuple(name for name in known if name in columns)
    if unknown := sorted(set(columns or ()).difference(known)):
        raise UsageError(
            f"no metadata column {', '.join(unknown)} in {dataset.pin.uri}@{dataset.pin.version}",
            f"expected some of {', '.join(known)}",
            "correct the name; `source.extra_columns` adds columns when a dataset is built",
        )
    index = dataset.index(split)
    tables, num_read = [], 0
    for shard in map(index.shard, range(index.num_shards)):
        tables.append(_of_shard(dataset, shard, wanted))
        num_read += tables[-1].num_rows
        if max_rows is not None and num_read >= max_rows:
            break
    return pa.concat_tables(tables).slice(0, max_rows)


def check_names(argument: str, names: Collection[str] | None) -> None:
    """Raises UsageError for one text in place of several: each of its letters would be a name."""
    if isinstance(names, str):
        raise UsageError(f"{argument} = {names!r}", "expected a list of names", f"pass [{names!r}]")


def _of_shard(dataset: Dataset, shard: ShardFile, wanted: tuple[str, ...]) -> pa.Table:
    schema = dataset.manifest.row_schema
    extra = {column.name: arrow_type(column.type) for column in schema.extra}
    # The segment is asked for what it stores: the texts of values for extra columns, the class for its name.
    stored = {LABEL if name == CLASS else name for name in wanted if name not in extra}
    if not schema.has_class or any(name in extra for name in wanted):
        stored.add("extra")
    rows = read_rows(dataset.store, shard, schema, stored or {"sample_id"})
    if rows.num_rows != shard.num_rows:
        raise IntegrityError(f"{shard.rows_path} has {rows.num_rows} rows", f"expected {shard.num_rows}")
    texts = rows.column("extra").to_pylist() if "extra" in rows.column_names else []
    values = schema.values_of(texts)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in wanted:
        if name in extra:
            columns[name] = pa.array([each.get(name) for each in values], extra[name])
        elif name == CLASS:
            columns[name] = _class_names(rows.column(LABEL), schema)
        elif name == LABEL and not schema.has_class:
            labels = stored_labels(texts, schema.label_type, schema.class_names)
            columns[name] = pa.array(labels, arrow_type(schema.label_type))
        else:
            columns[name] = rows.column(name)
    return pa.table(columns)


def _class_names(labels: pa.ChunkedArray, schema: RowSchema) -> pa.Array:
    names = schema.class_names
    return pa.array([None if label is None else names[label] for label in labels.to_pylist()], pa.string())
