"""A table's rows in batches and bounded memory: CSV and JSON lines are read here, others as their kinds do.

Texts may be in any Unicode encoding, others fail with a one-line error. How a CSV file is written is detected: its
delimiter, its names, and spaces around its values.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from etl.sources import SOURCES
from etl.sources.columns import are_inexact, bad_row, text_of_value
from etl.sources.containers import is_named, open_file, plain_name
from etl.sources.row_file import RowFile, RowFormat, bytes_leaf, checked_batches
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import ARROW_TYPES
from shardmill.values import Rejection
from shardmill.words import printable

_READ_BYTES = 1 << 20
# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_HEAD_BYTES = 512


def utf8_stream(stream: BinaryIO, table: str) -> io.BufferedReader:
    """The text without its byte order mark. Reading raises UsageError at the first bytes that are not in
    this encoding.
    """
    return io.BufferedReader(_Utf8(stream, table), _READ_BYTES)


class _Utf8(io.RawIOBase):
    def __init__(self, stream: BinaryIO, table: str) -> None:
        self._stream, self._table = stream, table
        head = stream.read(_HEAD_BYTES)
        self._encoding = _encoding_of(head)
        self._decoder = codecs.getincrementaldecoder(self._encoding)()
        self._num_read = 0
        self._waiting = self._decoded(head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            block = self._stream.read(_READ_BYTES)
            self._waiting = self._decoded(block)
            if not block:
                break
        num_bytes = min(len(buffer), len(self._waiting))
        buffer[:num_bytes] = self._waiting[:num_bytes]
        self._waiting = self._waiting[num_bytes:]
        return num_bytes

    def _decoded(self, block: bytes) -> memoryview:
        try:
            text = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = max(0, self._num_read + error.start)
            raise UsageError(
                f"the table {printable(self._table)} is not {self._encoding.removesuffix('-sig').upper()}: byte "
                f"0x{error.object[error.start]:02x} near byte {place}",
                "expected UTF-8, or UTF-16 with its byte order mark",
                "convert it; for Windows-1252 (Western Windows): iconv -f WINDOWS-1252 -t UTF-8",
            ) from None
        self._num_read += len(block)
        # What was decoded only to be checked needs no second copy.
        return memoryview(block if self._encoding == "utf-8" else text.encode())


def _encoding_of(head: bytes) -> str:
    marked = next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)
    if marked is not None:
        return marked
    # A table begins with a name or a bracket: of its first letter, one byte in UTF-16 is zero.
    if len(head) > 1 and 0 in head[:2] and head[:2] != b"\0\0":
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    return "utf-8"


_MAX_HEADER_BYTES = 1 << 20
_DELIMITERS = (",", ";", "\t", "|")
_NAMED_DELIMITER = re.compile(rb'"?sep=(.)"?\r?\n')
_HEADER = re.compile(rb'(?:[^"\r\n]+|"[^"]*")*')
_QUOTED = r'^"(.*)"$'


@dataclass(frozen=True, slots=True)
class TextForm:
    """The form of a table's lines."""

    delimiter: str
    names: tuple[str, ...]
    """The columns' names as they are written, with the spaces around them; empty if the first line does not parse."""

    def tidied(self, rows: pa.Table) -> pa.Table:
        """Rows without the spaces around names; if `, ` stands between the names, also around the values."""
        if rows.column_names == [name.strip() for name in rows.column_names]:
            return rows
        names = _stripped(pa.chunked_array([pa.array(rows.column_names)])).to_pylist()
        return pa.table([_stripped(column) for column in rows.columns], names=names)


def text_form(stream: io.BufferedReader, usual_delimiter: str) -> TextForm:
    """Detect the form of a table from its beginning; a first line `sep=;`, as some spreadsheets want it, is skipped.

    Of delimiters that are in the line of names, outside of quotes, it is the most frequent; the usual one if none is.
    """
    named = _NAMED_DELIMITER.match(stream.peek(_MAX_HEADER_BYTES))
    if named:
        stream.read(named.end())
    header = _header(stream.peek(_MAX_HEADER_BYTES).lstrip(b"\r\n"))
    bare = re.sub(rb'"[^"]*"', b"", header)
    most_frequent = max((usual_delimiter, *_DELIMITERS), key=lambda each: bare.count(each.encode()))
    delimiter = named[1].decode() if named else most_frequent
    try:
        options = pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        first = pa_csv.read_csv(io.BytesIO(header + b"\n"), parse_options=options)
    except pa.ArrowInvalid:
        return TextForm(delimiter, ())
    return TextForm(delimiter, tuple(first.column_names))


def _header(head: bytes) -> bytes:
    """The line of names; a name in quotes may have several lines."""
    found = _HEADER.match(head)
    is_whole = found is not None and not head.startswith(b'"', found.end())
    return found[0] if found and is_whole else re.split(rb"[\r\n]", head, maxsplit=1)[0]


def _stripped(texts: pa.ChunkedArray) -> pa.ChunkedArray:
    """Without the spaces around a value, and then without its quotes: `a, "b"` has a space before the quote."""
    texts = pc.utf8_trim_whitespace(texts)
    is_quoted = pc.match_substring_regex(texts, _QUOTED)
    return pc.if_else(is_quoted, pc.replace_substring(pc.utf8_slice_codeunits(texts, 1, -1), '""', '"'), texts)


_BLOCK_BYTES = 4 << 20
_MAX_LINE_BYTES = 16 << 20


def read_rows(
    store: Store,
    file: StoredFile,
    wanted: Mapping[str, str] | None = None,
    row_format: RowFormat | None = None,
) -> Iterator[pa.Table | Rejection]:
    """The columns of a table in its order, and a rejection for each line that is not a row.

    Only `wanted` columns, in any case, may contain lists or bytes; their types, if given, help to parse them.
    Raises IntegrityError if the file is damaged, because row boundaries after the damage are unknown.
    """
    name, kinds = plain_name(file.path), wanted or {}
    reads = row_format or _format_of(name)
    # Readers of texts name the table themselves.
    damage = (pa.ArrowException, EOFError, gzip.BadGzipFile, *(() if reads is None else (IntegrityError,)))
    with open_file(store, file) as stream:
        try:
            with as_storage_error(file.path):
                if reads is not None:
                    yield from _columns_of(reads.open(stream, file), kinds)
                    return
                unpacked: Any = gzip.GzipFile(fileobj=stream) if name.endswith(".gz") else stream
                yield from TEXT_READERS[name.removesuffix(".gz").rpartition(".")[2]](unpacked, file.path, kinds)
        except damage as error:
            formats = row_format.name if row_format is not None else "Parquet, Arrow, CSV or JSON lines"
            raise IntegrityError(
                f"the table {printable(file.path)} does not parse: {str(error).splitlines()[0]}",
                f"expected the format that its name indicates: {formats}",
                "restore the file, or correct it",
            ) from None


def _columns_of(file: RowFile, wanted: Mapping[str, str]) -> Iterator[pa.Table]:
    """The wanted columns, and all that may be texts."""
    chosen = {name.strip().lower() for name in wanted}
    names = [
        field.name
        for field in file.schema
        if field.name.strip().lower() in chosen or not (pa.types.is_nested(field.type) or bytes_leaf(field) is not None)
    ]
    return (rows for rows, _, _ in checked_batches(file, names))


def _format_of(path: str) -> RowFormat | None:
    """That of the kind of source with such files, None for texts."""
    kinds = (kind for kind, entry in SOURCES.entries.items() if entry.suffixes and is_named(path, entry.suffixes))
    return next((SOURCES[kind].row_format for kind in kinds if hasattr(SOURCES[kind], "row_format")), None)


def first_rows(head: bytes, table: str) -> pa.Table | None:
    """Those in the beginning of a table of text. Raises UsageError or ArrowException if it is none."""
    rows = TEXT_READERS[plain_name(table).rpartition(".")[2]](io.BytesIO(head), table, {})
    return next((each for each in rows if isinstance(each, pa.Table)), None)


def _read_csv(stream: BinaryIO, table: str, wanted: Mapping[str, str]) -> Iterator[pa.Table | Rejection]:
    head = utf8_stream(stream, table)
    form = text_form(head, "\t" if plain_name(table).removesuffix(".gz").endswith(".tsv") else ",")
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


TEXT_READERS = {
    "csv": _read_csv,
    "tsv": _read_csv,
    "jsonl": _read_json_lines,
    "ndjson": _read_json_lines,
}
