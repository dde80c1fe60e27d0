"""Columns of a table that its user wrote: found by their usual names, or by the config's; values as class names."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from etl.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import SPLIT_OF_NAME
from shardmill.errors import UsageError
from shardmill.printable import printable
from shardmill.values import UNKNOWN_SIZE, Rejection, RejectReason

_TEXTS = dict.fromkeys(("etag", "container", "extra", "known_sha256"), "")
_DEFAULTS = {"size_bytes": UNKNOWN_SIZE, "mtime_ns": 0, "block": 0, **_TEXTS}


def choose_column(names: Sequence[str], configured: str, usual: Sequence[str], key: str) -> str | None:
    """The configured column, else the first of the usual names that exists. Raises UsageError if that is not there."""
    if not configured:
        return next((name for name in usual if name in names), None)
    if configured in names:
        return configured
    near = difflib.get_close_matches(configured, names, n=1)
    raise UsageError(
        f"source.{key} = {configured!r} is no column",
        f"expected one of {', '.join(map(repr, names[:20]))}" + (f"; did you mean {near[0]!r}?" if near else ""),
        f"correct source.{key}",
    )


def misspelt(names: Sequence[str], used: Mapping[str, str | None], table: str) -> tuple[str, ...]:
    """A warning for each usual column that is missing beside one of nearly its name, which is then ignored.

    `used`: usual name -> the column that stands for it, or None.
    """
    found = []
    for usual, column in used.items():
        near = difflib.get_close_matches(usual, [name.strip().lower() for name in names], n=1, cutoff=0.75)
        if column is None and near:
            given = next(name for name in names if name.strip().lower() == near[0])
            found.append(
                f"{printable(table)} has no column {usual!r}, and its column {given!r} is ignored: rename it, or set "
                f"source.{usual}_field"
            )
    return tuple(found)


def class_names_of(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """The names that Hugging Face's `ClassLabel`, or a list of them, keeps in the file's metadata; empty without."""
    try:
        text = (schema.metadata or {}).get(b"huggingface", b"{}")
        feature = json.loads(text).get("info", {}).get("features", {}).get(column, {})
        if isinstance(feature, list) or "feature" in feature:
            # A list is `[{...}]` in older files, and a feature with the type of its elements in newer ones.
            feature = feature[0] if isinstance(feature, list) else feature["feature"]
        names = feature.get("names", ()) if feature.get("_type") == "ClassLabel" else ()
        return tuple(str(name) for name in names)
    except (ValueError, AttributeError, TypeError, IndexError):
        return ()


def as_labels(column: pa.ChunkedArray, class_names: tuple[str, ...], where: str) -> pa.ChunkedArray:
    """Class names as strings, null if there is none: numbers by `class_names`, else as their digits.

    Raises UsageError for a column that cannot name classes.
    """
    column = _plain(column)
    kind = column.type
    if pa.types.is_floating(kind) and _is_integral(column):
        # What pandas makes of whole numbers beside a missing one.
        column, kind = column.cast(pa.int64()), pa.int64()
    if pa.types.is_integer(kind) and class_names:
        numbers = column.cast(pa.int64())
        is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(class_names)))
        # -1 stands for "no label" in the test splits of Hugging Face's datasets.
        return pa.chunked_array(
            [pa.array(class_names, pa.string()).take(chunk) for chunk in pc.if_else(is_named, numbers, None).chunks],
            pa.string(),
        )
    if not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or kind == pa.null()):
        raise UsageError(
            f"the labels of {where} are {kind}", "expected strings or whole numbers, one class for each image",
            "choose another column with source.label_field",
        )  # fmt: skip
    return nulls_for_empty(column.cast(pa.string()))


def as_splits(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Names of splits (null: the content hash decides), and a mask of texts that name no split."""
    encoded = texts.dictionary_encode()
    named = [
        None if name is None else SPLIT_OF_NAME.get(name.strip().lower()) for name in encoded.dictionary.to_pylist()
    ]
    splits = pa.array(named, pa.string()).take(encoded.indices)
    return splits, pc.and_(splits.is_null(), texts.is_valid())


def as_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings; what is empty is null. Raises UsageError for columns that are not text."""
    column = _plain(column)
    if pa.types.is_binary(column.type) or pa.types.is_nested(column.type):
        raise UsageError(f"a column is {column.type}", "expected text", "check source.uri_field and source.key_field")
    return nulls_for_empty(column.cast(pa.string()))


def nulls_for_empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """`column` with null in place of empty strings."""
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), pa.scalar(None, pa.string()), column)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string()) if pa.types.is_large_string(column.type) else column


def _is_integral(column: pa.ChunkedArray) -> bool:
    return bool(pc.all(pc.equal(pc.floor(column), column), min_count=0).as_py())


def listed_rows(columns: Mapping[str, pa.Array], problems: pa.Array, table: str) -> ListingBatch:
    """A batch of a table's rows as a part of the listing.

    `columns` has `key`, `place` (the row's number) and what else is known, `group` included; `problems` says why a row
    is refused, null if it is not.
    """
    num_rows = len(problems)
    arrays = [columns[name] if name in columns else _constant(field, num_rows) for name, field in _FIELDS.items()]
    listed = pa.table(arrays, names=LISTED_SCHEMA.names)
    refused = pa.table([columns["place"], problems], names=["row", "problem"]).filter(problems.is_valid())
    return ListingBatch(
        listed.filter(problems.is_null()).cast(LISTED_SCHEMA),
        tuple(bad_row(table, each["row"], each["problem"]) for each in refused.to_pylist()),
        groups=columns["group"].filter(problems.is_null()) if "group" in columns else None,
    )


def bad_row(table: str, row: int, problem: str) -> Rejection:
    """The rejection of one row of a table."""
    return Rejection(f"{table}\0{row}", RejectReason.BAD_ROW, f"row {row}: {problem}", stage="list")


def or_else(problems: pa.Array, is_bad: pa.Array, problem: str) -> pa.Array:
    """`problems` with one more for the rows that have none yet."""
    return pc.coalesce(problems, pc.if_else(is_bad, problem, pa.scalar(None, pa.string())))


_FIELDS = {field.name: field for field in LISTED_SCHEMA}


def _constant(field: pa.Field, num_rows: int) -> pa.Array:
    if field.name not in _DEFAULTS:
        return pa.nulls(num_rows, field.type)
    return pa.repeat(pa.scalar(_DEFAULTS[field.name], field.type), num_rows)
