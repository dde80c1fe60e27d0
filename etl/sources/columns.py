"""A table's columns: found by their usual names or by the config, read as texts, class names, splits and labels.

Equal values are equal in every format: `1`, `"1"` and `1.0` are one class.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import codecs
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import NO_LABEL, SPLIT_OF_NAME, WHOLE_NUMBER, class_name_of, is_class_name
from shardmill.errors import IntegrityError, UsageError
from shardmill.typed_columns import names_coordinates
from shardmill.values import UNKNOWN_SIZE, LabelKind, Rejection, RejectReason
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


def unread_coordinates(names: Sequence[str], used: Sequence[str], table: str) -> tuple[str, ...]:
    """A warning for columns that are called as boxes or points in the image usually are, and are not read as such."""
    found = [printable(name) for name in names if names_coordinates(name) and name not in used]
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


_INT64_END = 2.0**63
EXACT_FLOATS = {32: 2.0**24, 64: 2.0**53}
"""From this value on, a float of so many bits cannot distinguish neighbouring whole numbers."""
_MIDNIGHT = r" 00:00:00$"
_WHOLE = re.compile(WHOLE_NUMBER)


def text_of_value(value: Any) -> str:
    """Return the text of a value parsed by Python, empty for NaN; lists and objects become JSON."""
    if isinstance(value, float):
        return "" if math.isnan(value) else str(int(value)) if value.is_integer() else repr(value)
    return value if isinstance(value, str) else json.dumps(value)


def whole_text(text: str) -> str:
    """`1` for the text `1.0`, which programs write for whole numbers beside a missing one."""
    found = _WHOLE.match(text)
    return found[1] if found else text


def value_texts(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """A column's values as strings, null for NaN; None if its type has no texts, such as bytes and lists."""
    column = plain_texts(column)
    kind = column.type
    if pa.types.is_float16(kind):
        return None  # Arrow casts them to no other type
    if pa.types.is_floating(kind):
        return _float_texts(column)
    if pa.types.is_decimal(kind):
        return whole_texts(_without_zeros(column.cast(pa.string())))
    if pa.types.is_timestamp(kind):
        return _time_texts(column)
    if pa.types.is_time(kind):
        return _without_zeros(column.cast(pa.string()))
    if pa.types.is_date64(kind):
        column = column.cast(pa.date32())
    is_plain = (
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_null(kind)
    )
    return column.cast(pa.string()) if is_plain else None


def whole_texts(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """`whole_text` of each."""
    return pc.replace_substring_regex(texts, WHOLE_NUMBER, r"\1")


def are_inexact(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A mask of floats so large that they may be the rounded ones of other whole numbers."""
    if not pa.types.is_floating(column.type) or pa.types.is_float16(column.type):
        return pa.chunked_array([pa.repeat(False, len(column))])
    return pc.fill_null(pc.greater_equal(pc.abs(_finite(column)), EXACT_FLOATS[column.type.bit_width]), False)


def plain_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column without dictionaries, its texts as `string`."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column.cast(pa.string()) if pa.types.is_large_string(column.type) else column


def _time_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if kind.tz:
        # As an instant: files of one table may name several zones.
        instants = column.cast(pa.int64()).cast(pa.timestamp(kind.unit))
        return pc.binary_join_element_wise(_without_zeros(instants.cast(pa.string())), "Z", "")
    return pc.replace_substring_regex(_without_zeros(column.cast(pa.string())), _MIDNIGHT, "")


def _float_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = column.cast(pa.float64())
    is_whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), _INT64_END))
    texts = pc.if_else(is_whole, numbers, pa.scalar(None, pa.float64())).cast(pa.int64()).cast(pa.string())
    is_other = pc.and_(numbers.is_valid(), pc.invert(pc.or_(pc.fill_null(is_whole, False), pc.is_nan(numbers))))
    is_other = pc.fill_null(is_other, False)
    if not pc.any(is_other, min_count=0).as_py():
        return texts
    # Arrow writes 123456789012.5 as 1.234567890125e+11, and the shortest digits depend on the width of the float.
    written = [text_of_value(float(str(each))) for each in column.filter(is_other).to_numpy()]
    return pa.chunked_array(
        [pc.replace_with_mask(texts.combine_chunks(), is_other.combine_chunks(), pa.array(written, pa.string()))]
    )


def _finite(column: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = column.cast(pa.float64())
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))


def _without_zeros(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without the zeros at the end of a fraction."""
    texts = pc.replace_substring_regex(texts, r"\.0+$", "")
    return pc.replace_substring_regex(texts, r"(\.\d*[1-9])0+$", r"\1")


_BYTE_ORDER_MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}


def text_of(data: bytes) -> str | None:
    """The text of a file or feature without a byte order mark and spaces around it; None if it is not UTF-8 or 16."""
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if data.startswith(mark)), "utf-8-sig")
    try:
        return data.decode(encoding).strip().strip("\0")
    except UnicodeDecodeError:
        return None


def class_of(values: Sequence[Any], name: str) -> tuple[str | None, str]:
    """The class that a label's values name, or None and why they name none; `name` is that of the label."""
    text, problem = single_text(values, name)
    found = class_name_of(text or "")
    return (found, "") if found else (None, problem or f"no {name}")


def single_text(values: Sequence[Any], name: str) -> tuple[str | None, str]:
    """The only value as a text, whole numbers without a fraction; or None and why there is none."""
    if len(values) > 1:
        several = f"{name} has {len(values)} values, but a class is one value"
        return None, f'{several}; source.label_kind = "multi_label" or "float_vector" takes all'
    value = values[0] if values else None
    if isinstance(value, list):
        return single_text(value, name) if value else (None, f"{name} is an empty list")
    if isinstance(value, bytes | memoryview):
        value = text_of(bytes(value))
        if value is None:
            return None, f"{name} is not UTF-8"
    if isinstance(value, float) and not value.is_integer():
        return None, f'{name} is {value}, which is no class; source.label_kind = "float" takes numbers'
    if isinstance(value, dict):
        return None, f"{name} is an object; source.label_field may name a field of it"
    text = "" if value is None else text_of_value(value).strip()
    return (text, "") if text else (None, f"no {name}")


# Beyond it, a float64 no longer tells two whole numbers apart.
_MAX_EXACT = float(1 << 53)


def as_labels(column: pa.ChunkedArray, class_names: tuple[str, ...], where: str) -> pa.ChunkedArray:
    """Class names as strings, null if there is none: numbers by `class_names`, else as their digits.

    Raises UsageError for a column that cannot name classes.
    """
    column = plain_texts(column)
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        # What pandas makes of whole numbers beside a missing one.
        column, kind = _whole_numbers(column, where), pa.int64()
    if pa.types.is_integer(kind) and class_names:
        numbers = column.cast(pa.int64())
        is_named = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, len(class_names)))
        # -1 means "no label" in the test splits of Hugging Face's datasets.
        return pa.chunked_array(
            [pa.array(class_names, pa.string()).take(chunk) for chunk in pc.if_else(is_named, numbers, None).chunks],
            pa.string(),
        )
    texts = value_texts(column)
    if texts is None:
        raise _no_classes(kind, where)
    return _class_names(texts)


def _class_names(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """`class_name_of` of each text, null for an empty one; done once for each different text."""
    encoded = texts.combine_chunks().dictionary_encode()
    names = whole_texts(pc.utf8_trim_whitespace(encoded.dictionary))
    names = pc.if_else(pc.match_substring_regex(names, NO_LABEL), pa.scalar(None, pa.string()), names)
    return pa.chunked_array([names.take(encoded.indices)], pa.string())


def _whole_numbers(column: pa.ChunkedArray, where: str) -> pa.ChunkedArray:
    """int64, null for what is not finite. Raises UsageError if a number is not whole."""
    kind = column.type
    numbers = _finite(column)
    is_whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less_equal(pc.abs(numbers), _MAX_EXACT))
    is_whole = pc.and_(is_whole, pc.invert(are_inexact(column)))
    if not pc.all(is_whole, min_count=0).as_py():
        raise _no_classes(kind, where)
    return numbers.cast(pa.int64())


def _no_classes(kind: pa.DataType, where: str) -> UsageError:
    return UsageError(
        f"the labels of {where} are {kind}", "expected strings or whole numbers, one class for each image",
        "choose another column with source.label_field, or another source.label_kind (docs/sources.md)",
    )  # fmt: skip


# What the column is read as; a vector's type gets its length from the first one.
_READ_AS: dict[LabelKind, str] = {"multi_label": "list<string>", "float": "float32", "float_vector": "list<float32>"}


class Target:
    """One source's labels of a kind other than `class`."""

    def __init__(self, kind: LabelKind) -> None:
        self.read_as = _READ_AS[kind]
        self._kind: LabelKind = kind
        self._size = 0

    @property
    def type(self) -> str:
        """Type of the labels so far: `list<string>`, `float32` or `float32[N]`; empty before the first vector."""
        if self._kind == "float_vector":
            return f"float32[{self._size}]" if self._size else ""
        return self.read_as

    def named(self, column: pa.Array, class_names: Sequence[str]) -> pa.Array:
        """Lists of class numbers as lists of names, if the file has names; a number without one makes its row null."""
        is_numbers = pa.types.is_list(column.type) and pa.types.is_integer(column.type.value_type)
        if self._kind != "multi_label" or not class_names or not is_numbers:
            return column
        names = dict(enumerate(class_names))
        lists = [each and [names.get(number) for number in each] for each in column.to_pylist()]
        return pa.array([None if each and None in each else each for each in lists], pa.list_(pa.string()))

    def prepared(self, value: Any) -> Any:
        """A text of several class names as a list: JSON, or names with `|` between them."""
        if self._kind != "multi_label" or not isinstance(value, str):
            return value
        if not value.strip():
            return None
        if value.lstrip().startswith("["):
            return json.loads(value)
        return [name.strip() for name in value.split("|") if name.strip()]

    def checked(self, value: Any) -> Any:
        """The label as it is kept: class names sorted, each once. Raises ValueError that says what is wrong."""
        if value is None:
            raise ValueError("no label")
        if self._kind == "multi_label":
            odd = next((name for name in value if not is_class_name(class_name_of(name))), None)
            if odd is not None:
                raise ValueError(f"{printable(odd[:60])!r} is no class name")
            return sorted(set(map(class_name_of, value)))
        numbers = value if isinstance(value, list) else [value]
        if not all(map(math.isfinite, numbers)):
            raise ValueError("not finite")
        if self._kind == "float_vector":
            self._size = self._size or len(numbers)
            if not numbers or len(numbers) != self._size:
                raise ValueError(f"a label of {len(numbers)} numbers, expected {self._size or 'at least one'}")
        return value


def class_names_of(schema: pa.Schema, column: str) -> tuple[str, ...]:
    """The names that Hugging Face's `ClassLabel`, or a list of them, keeps in the file's metadata; empty without.

    `objects.category` is a field of a struct, or of a list of structs.
    """
    try:
        text = (schema.metadata or {}).get(b"huggingface", b"{}")
        feature = {"feature": json.loads(text).get("info", {}).get("features", {})}
        for name in [column] if column in feature["feature"] else column.split("."):
            feature = _of_elements(_of_elements(feature).get(name, {}))
        names = feature.get("names", ()) if feature.get("_type") == "ClassLabel" else ()
        return tuple(str(name) for name in names)
    except (ValueError, AttributeError, TypeError, IndexError):
        return ()


def _of_elements(feature: Any) -> Any:
    """Of a list's elements: `[{...}]` in older files, and a feature with the type of its elements in newer ones."""
    if isinstance(feature, list):
        return feature[0]
    return feature.get("feature", feature)
