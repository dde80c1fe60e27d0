"""Finds the columns of a user's table by their usual names or by the config, and reads values as class names."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.labels import are_inexact, plain_texts, value_texts, whole_texts
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import SPLIT_OF_NAME
from shardmill.errors import IntegrityError, UsageError
from shardmill.printable import printable
from shardmill.typed_columns import names_places
from shardmill.values import UNKNOWN_SIZE, Rejection, RejectReason
from shardmill.words import first_of, printable

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from shardmill.storage import StoredFile

_TEXTS = dict.fromkeys(("etag", "container", "extra", "known_sha256", "known_mask_sha256"), "")
# What one batch may become in memory.
_MAX_BATCH_BYTES = 1 << 30
_DEFAULTS = {"size_bytes": UNKNOWN_SIZE, "mtime_ns": 0, "block": 0, **_TEXTS}


def with_constants(rows: pa.Table, constants: Mapping[str, str | None]) -> pa.Table:
    """The rows with columns that have one text in all of them."""
    for name, text in constants.items():
        rows = rows.append_column(name, pa.repeat(pa.scalar(text, pa.string()), rows.num_rows))
    return rows


def choose_column(names: Sequence[str], configured: str, usual: Sequence[str], key: str) -> str | None:
    """The configured column, else the first of the usual names that exists, in any case and with spaces around it.

    Raises UsageError if the configured one is not there, or if the column that is meant is there twice.
    """
    meant = (_called(each, names) for each in ([configured] if configured else usual))
    found = next((each[0] for each in filter(None, meant) if is_there_once(each, key)), None)
    if found is not None or not configured:
        return found
    near = difflib.get_close_matches(configured, names, n=1)
    raise UsageError(
        f"source.{key} = {configured!r} is not a column",
        f"expected one of {', '.join(map(repr, names[:20]))}" + (f"; did you mean {near[0]!r}?" if near else ""),
        f"correct source.{key}",
    )


def choose_label_column(names: Sequence[str], config: SourceConfig, usual: Sequence[str]) -> str | None:
    """The column of labels as `choose_column` finds it; None if the config asks for none."""
    return None if config.label_kind == "none" else choose_column(names, config.label_field, usual, "label_field")


def is_there_once(found: Sequence[str], key: str = "") -> bool:
    """True for one column, of those that may be meant. Raises UsageError for several; `source.KEY` chooses one."""
    if len(found) == 1:
        return True
    same = len(set(found)) == 1
    raise UsageError(
        f"the column {found[0]!r} occurs {len(found)} times"
        if same
        else f"the columns {', '.join(map(repr, dict.fromkeys(found)))} differ only in case or spaces",
        "expected each used column to occur once",
        "rename or remove the other one" + (f", or set source.{key} to {'another' if same else 'one'}" if key else ""),
    )


def _called(wanted: str, names: Sequence[str]) -> list[str]:
    """The columns of a name as it is written, else all that differ from it by case and spaces around it."""
    exact = [name for name in names if name == wanted]
    return exact or [name for name in names if name.strip().lower() == wanted.strip().lower()]


def misspelt(names: Sequence[str], used: Mapping[str, str | None], table: str) -> tuple[str, ...]:
    """A warning for each usual column that is missing beside one of nearly its name, which is then ignored.

    `used`: usual name -> the column used for it, or None.
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


def unread_places(names: Sequence[str], used: Sequence[str], table: str) -> tuple[str, ...]:
    """A warning for columns that are called as boxes or points in the image usually are, and are not read as such."""
    found = [printable(name) for name in names if names_places(name) and name not in used]
    if not found:
        return ()
    return (
        f"{printable(table)} has the columns {first_of(found, 4)}, which are not read: for boxes, name a column of "
        'lists such as "[[xmin, ymin, xmax, ymax], ...]", one row for an image, in source.boxes.field '
        "(docs/boxes.md)",
    )


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
    texts = value_texts(column)
    if texts is None:
        raise UsageError(
            f"a column of URIs, keys or groups is {plain_texts(column).type}",
            "expected one text in each row",
            "check source.uri_field, key_field and group_field; for a list of images, write a row for each",
        )
    if pc.any(are_inexact(column), min_count=0).as_py():
        raise UsageError(
            f"a column of URIs, keys or groups is {column.type}, and a number in it has too many digits for that type",
            "expected whole numbers or texts, because two numbers may have been rounded to the same value",
            "write the column as int64 or as text",
        )
    return nulls_for_empty(texts)


def as_names(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings that name keys or groups: as `as_texts`, and `1` for `1.0` also where a file has only texts."""
    return whole_texts(as_texts(column))


def nulls_for_empty(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """`column` with null in place of empty strings."""
    return pc.if_else(pc.equal(pc.utf8_trim_whitespace(column), ""), pa.scalar(None, pa.string()), column)


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


def file_columns(
    file: StoredFile, numbers_N: np.ndarray, blocks_N: np.ndarray, split: str | None
) -> dict[str, pa.Array]:
    """The columns of images that one file holds, by their numbers in it."""
    num_rows, places = len(numbers_N), pa.array(numbers_N)
    return {
        "key": pc.binary_join_element_wise(file.path, places.cast(pa.string()), "\0"),
        "mtime_ns": pa.repeat(file.mtime_ns, num_rows),
        "etag": pa.repeat(file.etag, num_rows),
        "split": pa.repeat(pa.scalar(split, pa.string()), num_rows),
        "container": pa.repeat(file.path, num_rows),
        "place": places,
        "block": pa.array(blocks_N),
    }


def bad_row(table: str, row: int, problem: str) -> Rejection:
    """The rejection of one row of a table."""
    return Rejection(f"{table}\0{row}", RejectReason.BAD_ROW, f"row {row}: {problem}", stage="list")


def or_else(problems: pa.Array, is_bad: pa.Array, problem: str) -> pa.Array:
    """`problems` with one more for the rows that have none yet."""
    return pc.coalesce(problems, pc.if_else(is_bad, problem, pa.scalar(None, pa.string())))


def check_texts(column: pa.ChunkedArray) -> None:
    """Raise IntegrityError if a batch is too large in memory: one long text of a hostile file may be in every row."""
    for chunk in column.chunks:
        chunk = pc.list_flatten(chunk) if pa.types.is_list(chunk.type) else chunk
        if not pa.types.is_dictionary(chunk.type):
            continue
        lengths = pc.binary_length(chunk.dictionary).to_numpy(zero_copy_only=False)
        if lengths[chunk.indices.drop_null().to_numpy()].sum() > _MAX_BATCH_BYTES:
            raise IntegrityError(
                f"{len(column)} of its rows would become more than {_MAX_BATCH_BYTES} bytes", "expected short texts"
            )


_FIELDS = {field.name: field for field in LISTED_SCHEMA}


def _constant(field: pa.Field, num_rows: int) -> pa.Array:
    if field.name not in _DEFAULTS:
        return pa.nulls(num_rows, field.type)
    return pa.repeat(pa.scalar(_DEFAULTS[field.name], field.type), num_rows)
