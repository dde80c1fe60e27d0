"""Arrow's IPC files (Feather, and what Hugging Face's `save_to_disk` writes): the columns that are asked for alone.

A file is a stream of messages, with a footer behind it or without. Their heads say where each column's buffers lie, so
a listing reads no image, and the record batches before a cut are whole. Format:
https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from etl.sources.names import ARROW_SUFFIXES
from etl.sources.row_file import BATCH_ROWS, RowFormat, RowImage, blocks_of
from etl.sources.rows import ImageRows
from shardmill.errors import IntegrityError
from shardmill.storage import StoredFile

_MAGIC, _OLD_MAGIC, _PREFIX = b"ARROW1\0\0", b"FEA1", struct.Struct("<Ii")
_NEXT, _END = 0xFFFFFFFF, _PREFIX.pack(0xFFFFFFFF, 0)
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3
_MAX_HEAD_BYTES = 64 << 20
# Of one record batch in memory: the columns that a listing reads, or the images.
_MAX_COLUMN_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Message:
    """A schema, dictionary or record batch."""

    kind: int
    start: int
    head_bytes: int
    """Bytes before its body, those of the prefix included."""
    body_bytes: int
    num_rows: int


class ArrowFile:
    """One file. Its record batches are blocks, and large ones several."""

    def __init__(self, stream: BinaryIO, file: StoredFile) -> None:
        """Raises IntegrityError if it has no schema. Of a cut one, `batches` raises it behind what is whole."""
        self._stream, self._problem = stream, ""
        self._messages: list[_Message] = []
        try:
            self._messages.extend(_messages(stream, file.size_bytes))
        except IntegrityError as error:
            self._problem = str(error)
        if not self._messages or self._messages[0].kind != _SCHEMA:
            raise IntegrityError(self._problem or "it begins with no schema")
        with _parsing("its schema"):
            self.schema = pa.ipc.read_schema(pa.py_buffer(self._read(self._messages[0])))
            self._names = [field.name for field in self.schema]
        self._batches = [each for each in self._messages if each.kind == _BATCH]
        # First row of each record batch, and the end of the last one.
        self._first_rows = (0, *itertools.accumulate(each.num_rows for each in self._batches))
        self.num_rows = self._first_rows[-1]

    def batches(self, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Raises IntegrityError if a batch would become too large, or where the file is cut."""
        for number, (first, end) in enumerate(itertools.pairwise(self._first_rows)):
            rows = self._columns(number, names) if names else pa.table({"": pa.nulls(end - first)})
            for start in range(first, end, BATCH_ROWS):
                places_N = np.arange(start, min(start + BATCH_ROWS, end), dtype=np.int64)
                yield rows.slice(start - first, len(places_N)), places_N, blocks_of(places_N, self._first_rows, number)
        if self._problem:
            raise IntegrityError(f"{self._problem}; the {self.num_rows} rows before that are listed")

    def images(self, leaf: str) -> Callable[[int], RowImage]:
        """Holds the images of one record batch."""
        name = leaf if leaf in self._names else leaf.removesuffix(".bytes")
        number, values = -1, pa.array([], pa.binary())

        def read(row: int) -> RowImage:
            nonlocal number, values
            wanted = bisect.bisect_right(self._first_rows, row) - 1
            if wanted >= len(self._batches):
                raise IntegrityError(f"the file ends before row {row}")
            if wanted != number:
                values = self._columns(wanted, [name]).column(0)
                number = wanted
            return values[row - self._first_rows[wanted]].as_py()

        return read

    def _columns(self, number: int, names: Sequence[str]) -> pa.Table:
        """Columns of a record batch, for which its message is made again with the buffers of others left out."""
        message = self._batches[number]
        before = itertools.takewhile(lambda each: each is not message, self._messages)
        opening = b"".join(self._read(each) for each in before if each.kind in (_SCHEMA, _DICTIONARY))
        head = self._read(message, with_body=False)
        start = len(opening) + len(head)
        # Pages of zeros take no memory until they are written to.
        data = np.zeros(start + message.body_bytes + len(_END), np.uint8)
        data[:start], data[-len(_END) :] = np.frombuffer(opening + head, np.uint8), np.frombuffer(_END, np.uint8)
        # Of columns with one name, the first; Arrow gives each place once.
        places, num_bytes = {name: self._names.index(name) for name in names}, 0
        with _parsing(f"record batch {number}"):
            buffers, is_packed = _buffers_of(head, self.schema)
            for place in places.values():
                for offset, length in buffers[place]:
                    if not 0 <= offset <= offset + length <= message.body_bytes:
                        raise ValueError("a buffer lies outside of it")
                    self._stream.seek(message.start + message.head_bytes + offset)
                    # A packed buffer begins with its size, -1 if it is not packed.
                    stated = int.from_bytes(self._stream.read(8)[:length], "little", signed=True) if is_packed else -1
                    num_bytes += length if stated < 0 else stated
                    if num_bytes > _MAX_COLUMN_BYTES:
                        raise IntegrityError(
                            f"record batch {number} has more than {_MAX_COLUMN_BYTES} bytes in the columns "
                            f"{', '.join(names)}; write smaller ones, such as of 1,000 rows"
                        )
                    self._stream.seek(message.start + message.head_bytes + offset)
                    data[start + offset : start + offset + length] = np.frombuffer(self._stream.read(length), np.uint8)
        options = pa.ipc.IpcReadOptions(included_fields=[*places.values()], use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(data), options=options) as reader:
            batch = reader.read_next_batch()
        # Without this, offsets of a damaged file lead anywhere in memory.
        batch.validate(full=True)
        found = dict(zip(sorted(places.values()), batch.columns, strict=True))
        columns = [found[places[name]] for name in names]
        return pa.table(columns, names=list(names), metadata=self.schema.metadata)

    def _read(self, message: _Message, *, with_body: bool = True) -> bytes:
        self._stream.seek(message.start)
        return self._stream.read(message.head_bytes + (message.body_bytes if with_body else 0))


def _messages(stream: BinaryIO, size_bytes: int) -> Iterator[_Message]:
    """Those of a file, without their bodies. Raises IntegrityError where the next one is not whole."""
    stream.seek(0)
    head = stream.read(len(_MAGIC))
    if head.startswith(_OLD_MAGIC):
        raise IntegrityError("it is Feather version 1; write it anew with pyarrow.feather.write_feather")
    start = len(_MAGIC) if head == _MAGIC else 0
    while True:
        stream.seek(start)
        prefix = stream.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise IntegrityError(f"the file ends without its end marker at byte {start}")
        mark, num_bytes = _PREFIX.unpack(prefix)
        if mark != _NEXT or not 0 <= num_bytes <= _MAX_HEAD_BYTES:
            raise IntegrityError(f"no message of Arrow at byte {start}")
        if num_bytes == 0:
            return
        head = prefix + stream.read(num_bytes)
        with _parsing(f"the message at byte {start}"):
            table = _root(head)
            kind, body_bytes = head[_field(head, table, 1)], _number(head, _field(head, table, 3))
            num_rows = _number(head, _field(head, _target(head, _field(head, table, 2)), 0)) if kind == _BATCH else 0
            if body_bytes < 0 or num_rows < 0:
                raise ValueError("it has a negative length")
        message = _Message(kind, start, len(head), body_bytes, num_rows)
        start += len(head) + body_bytes
        if kind == _DICTIONARY and body_bytes > _MAX_COLUMN_BYTES:
            raise IntegrityError(f"a dictionary of {body_bytes} bytes; at most {_MAX_COLUMN_BYTES} are read")
        if start > size_bytes or len(head) < _PREFIX.size + num_bytes:
            raise IntegrityError(f"the file ends inside the message at byte {message.start}")
        yield message


@contextmanager
def _parsing(what: str) -> Iterator[None]:
    """Turn what a damaged head leads to into IntegrityError."""
    try:
        yield
    except (struct.error, IndexError, ValueError) as error:
        raise IntegrityError(f"{what} does not parse: {error}") from None


# A message's head is a FlatBuffers table: https://flatbuffers.dev/internals/


def _root(head: bytes) -> int:
    return _PREFIX.size + struct.unpack_from("<I", head, _PREFIX.size)[0]


def _field(head: bytes, table: int, slot: int) -> int:
    """Where a table's field lies, 0 if it has none."""
    slots = table - struct.unpack_from("<i", head, table)[0]
    num_bytes = struct.unpack_from("<H", head, slots)[0]
    offset = struct.unpack_from("<H", head, slots + 4 + 2 * slot)[0] if 4 + 2 * slot < num_bytes else 0
    return table + offset if offset else 0


def _target(head: bytes, place: int) -> int:
    """What a field refers to."""
    return place + struct.unpack_from("<I", head, place)[0]


def _number(head: bytes, place: int) -> int:
    """An int64; 0 is left out by writers."""
    return struct.unpack_from("<q", head, place)[0] if place else 0


def _buffers_of(head: bytes, schema: pa.Schema) -> tuple[list[list[tuple[int, ...]]], bool]:
    """Offset and length of each buffer of each column of a record batch, and whether they are packed."""
    batch = _target(head, _field(head, _root(head), 2))
    packing, counts = _field(head, batch, 3), _vector(head, _field(head, batch, 4), "<q")
    buffers, num_more = _vector(head, _field(head, batch, 2), "<qq"), (count for [count] in counts)
    ends = [0, *itertools.accumulate(_num_buffers(field.type, num_more) for field in schema)]
    if ends[-1] != len(buffers):
        raise ValueError(f"it has {len(buffers)} buffers, and columns of its types {ends[-1]}")
    return [buffers[first:end] for first, end in itertools.pairwise(ends)], packing != 0


def _vector(head: bytes, place: int, item: str) -> list[tuple[int, ...]]:
    """The structs or numbers of a field; none without it."""
    if not place:
        return []
    start = _target(head, place)
    [count] = struct.unpack_from("<I", head, start)
    return [struct.unpack_from(item, head, start + 4 + struct.calcsize(item) * number) for number in range(count)]


def _num_buffers(kind: pa.DataType, num_more: Iterator[int]) -> int:
    """Of a column, those of its children included, in the order of the message.

    `num_more`: for each column of views, the buffers that it has beside the views.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return _num_buffers(kind.storage_type, num_more)
    if pa.types.is_null(kind):
        return 0
    if str(kind) in ("string_view", "binary_view"):
        return 2 + next(num_more, 0)
    if pa.types.is_run_end_encoded(kind):
        return _num_buffers(kind.run_end_type, num_more) + _num_buffers(kind.value_type, num_more)
    if pa.types.is_struct(kind) or pa.types.is_union(kind):
        own = 2 if pa.types.is_union(kind) and kind.mode == "dense" else 1
        inner = [kind.field(place) for place in range(kind.num_fields)]
        # A name that is no text is found here, and not where it is used.
        return own + sum(_num_buffers(field.type, num_more) for field in inner if field.name is not None)
    if pa.types.is_map(kind):
        return 3 + _num_buffers(kind.key_type, num_more) + _num_buffers(kind.item_type, num_more)
    if pa.types.is_fixed_size_list(kind):
        return 1 + _num_buffers(kind.value_type, num_more)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return 2 + _num_buffers(kind.value_type, num_more)
    has_offsets = pa.types.is_string(kind) or pa.types.is_binary(kind)
    return 3 if has_offsets or pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) else 2


ARROW = RowFormat("Arrow IPC", ARROW_SUFFIXES, ArrowFile)
claims = ARROW.holds_images


class ArrowSource(ImageRows):
    """Every row of the Arrow files that `source.uri` names: a folder, one file, or a pattern."""

    row_format = ARROW
