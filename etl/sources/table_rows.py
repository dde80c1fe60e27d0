"""A table's rows, in batches: Parquet, CSV and JSON lines, each read in bounded memory."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Generator, Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from etl.sources.columns import bad_row
from etl.sources.parquet_columns import column_batches, open_columns
from etl.sources.stored_file import open_file
from etl.sources.text_form import text_form
from etl.sources.text_stream import utf8_stream
from etl.sources.value_text import are_inexact, text_of_value
from shardmill.errors import IntegrityError
from shardmill.printable import printable
from shardmill.storage import Store, StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import ARROW_TYPES
from shardmill.values import Rejection

_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 16 << 20


def read_rows(
    store: Store, file: StoredFile, wanted: Mapping[str, str] | None = None
) -> Iterator[pa.Table | Rejection]:
    """The columns of a table in its order, and a rejection for each line that is not a row.

    Only `wanted` columns, in any case, may contain lists or bytes; their types, if given, help to parse them.
    Raises IntegrityError if the file is damaged, because row boundaries after the damage are unknown.
    """
    name = file.path.lower()
    with open_file(store, file) as stream:
        try:
            with as_storage_error(file.path):
                unpacked: Any = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
                yield from _READERS[name.removesuffix(".gz").rpartition(".")[2]](unpacked, file.path, wanted or {})
        except (pa.ArrowException, EOFError, gzip.BadGzipFile) as error:
            raise IntegrityError(
                f"the table {printable(file.path)} does not parse: {str(error).splitlines()[0]}",
                "expected the format that its name indicates: Parquet, CSV or JSON lines",
                "restore the file, or correct it",
            ) from None


def first_rows(head: bytes, table: str) -> pa.Table | None:
    """Those in the beginning of a table of text. Raises UsageError or ArrowException if it is none."""
    rows = _READERS[table.lower().rpartition(".")[2]](io.BytesIO(head), table, {})
    return next((each for each in rows if isinstance(each, pa.Table)), None)


def _read_parquet(stream: BinaryIO, table: str, wanted: Mapping[str, str]) -> Iterator[pa.Table | Rejection]:
    parquet = open_columns(stream)
    schema = parquet.schema_arrow
    chosen = {name.strip().lower() for name in wanted}
    names = [
        field.name
        for field in schema
        if field.name.strip().lower() in chosen
        or not (pa.types.is_nested(field.type) or pa.types.is_binary(field.type))
    ]
    for group in range(parquet.num_row_groups):
        yield from column_batches(parquet, group, names)


def _read_csv(stream: BinaryIO, table: str, wanted: Mapping[str, str]) -> Iterator[pa.Table | Rejection]:
    head = utf8_stream(stream, table)
    form = text_form(head, "\t" if table.lower().removesuffix(".gz").endswith(".tsv") else ",")
    # Row number -> problem. The reader skips such a row, possibly while it reads ahead of the current batch.
    refused: dict[int, Rejection] = {}
    first_row = 1

    def refuse(row: Any) -> str:
        problem = f"{row.actual_columns} values, expected {row.expected_columns}"
        refused[row.number - 1] = bad_row(table, row.number - 1, problem)
        return "skip"

    reader = pa_csv.open_csv(
        head,
        pa_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),  # rows have numbers in one thread only
        pa_csv.ParseOptions(delimiter=form.delimiter, newlines_in_values=True, invalid_row_handler=refuse),
        pa_csv.ConvertOptions(column_types=dict.fromkeys(form.names, pa.string())),  # "007" is a text
    )
    for batch in reader:
        first_row = yield from _in_order(form.tidied(pa.Table.from_batches([batch])), refused, first_row)
    yield from refused.values()


def _in_order(
    rows: pa.Table, refused: dict[int, Rejection], first_row: int
) -> Generator[pa.Table | Rejection, None, int]:
    """Valid and refused rows with their numbers; returns the number of the row after them.

    `refused` is left with what lies further behind.
    """
    place = 0
    for number in sorted(refused):
        num_before = number - first_row
        if num_before > rows.num_rows - place:
            break
        if num_before:
            yield _copied(rows, place, num_before)
        yield refused.pop(number)
        place, first_row = place + num_before, number + 1
    if place < rows.num_rows:
        yield _copied(rows, place, rows.num_rows - place)
    return first_row + rows.num_rows - place


def _copied(rows: pa.Table, start: int, num_rows: int) -> pa.Table:
    # pyarrow 14 cannot concatenate the results of string functions on slices ("buffer slice would exceed buffer
    # length").
    return rows if num_rows == rows.num_rows else rows.take(pa.array(range(start, start + num_rows)))


def _read_json_lines(stream: BinaryIO, table: str, wanted: Mapping[str, str]) -> Iterator[pa.Table | Rejection]:
    first_row = 1
    types = {name: ARROW_TYPES[kind] for name, kind in wanted.items() if kind}
    for block in _blocks_of_lines(utf8_stream(stream, table), table):
        try:
            rows, refused = _parse_block(block, types), {}
        except pa.ArrowInvalid:
            # Parse line by line if a line is invalid, a column has several types, or numbers would lose digits.
            lines = [line for line in block.split(b"\n") if line.strip()]
            rows, refused = _parse_lines(lines, table, first_row)
        first_row = yield from _in_order(rows, refused, first_row)


def _parse_block(block: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
    """Raises ArrowInvalid if the parsed values differ from the text of the lines."""

    def parsed(types: Mapping[str, pa.DataType]) -> pa.Table:
        options = pa_json.ParseOptions(explicit_schema=pa.schema(list(types.items())))
        return pa_json.read_json(io.BytesIO(block), parse_options=options)

    rows = parsed(types)
    # JSON has no dates, but Arrow converts texts to dates if all texts of a block look like dates.
    texts = {field.name: kind for field in rows.schema if (kind := _without_times(field.type)) != field.type}
    if texts:
        rows = parsed({**types, **texts})
    for column in rows.columns:
        numbers = pc.list_flatten(column) if pa.types.is_list(column.type) else column
        if pc.any(are_inexact(numbers), min_count=0).as_py():
            raise pa.ArrowInvalid("whole numbers that were rounded to floats")
    return rows


def _without_times(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    if pa.types.is_struct(kind):
        fields = (kind.field(place) for place in range(kind.num_fields))
        return pa.struct([pa.field(field.name, _without_times(field.type)) for field in fields])
    return kind


def _parse_lines(lines: list[bytes], table: str, first_row: int) -> tuple[pa.Table, dict[int, Rejection]]:
    values: list[dict[str, Any]] = []
    refused: dict[int, Rejection] = {}
    for row, line in enumerate(lines, start=first_row):
        try:
            parsed = json.loads(line, object_pairs_hook=_each_once)
            if not isinstance(parsed, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            refused[row] = bad_row(table, row, f"no JSON object: {error}")
            continue
        values.append(parsed)
    names = sorted({name for each in values for name in each})
    columns = [_column([each.get(name) for each in values]) for name in names]
    return pa.table(columns, names=names), refused


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ValueError if a name occurs twice, because its value is ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place]))
        raise ValueError(f"the name {twice!r} occurs twice")
    return found


def _column(values: list[Any]) -> pa.Array:
    """An array of the type that all values share, as in a block without invalid lines; texts if they share none."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError):
        return pa.array((None if value is None else text_of_value(value) for value in values), pa.string())


def _blocks_of_lines(stream: BinaryIO, table: str) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(_BLOCK_BYTES):
        end = block.rfind(b"\n") + 1
        if end:
            yield rest + block[:end]
            rest = b""
        rest += block[end:]
        if len(rest) > _MAX_LINE_BYTES:
            raise IntegrityError(
                f"a line of the table {printable(table)} is longer than {_MAX_LINE_BYTES} bytes",
                "expected one JSON object in each line",
            )
    if rest.strip():
        yield rest


_READERS = {
    "parquet": _read_parquet,
    "csv": _read_csv,
    "tsv": _read_csv,
    "jsonl": _read_json_lines,
    "ndjson": _read_json_lines,
}
