"""Parquet shards: a chunk is a row group; its images lie uncompressed in one plain page.

Layout: https://parquet.apache.org/docs/file-format/. pyarrow 14 neither writes nor checks page checksums, so what is
read here was verified before, against the CRC-32C of the whole row group in the index. Values of plain, uncompressed
pages of columns that are never null are found where they lie in the row group's bytes: what Arrow would copy, and parse
for 0.5 to 1.3 ms. Arrow reads all others.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.errors import IntegrityError
from shardmill.formats.rows import (
    VECTOR,
    ByteRange,
    ChunkRows,
    RowSchema,
    ShardFormat,
    Slices,
    StoredRow,
    Texts,
    WrittenShard,
)
from shardmill.options import ENCODINGS
from shardmill.typed_columns import MASK, arrow_type, label_array

if TYPE_CHECKING:
    import pyarrow.parquet as pq


CLASS_NAMES_KEY = "shardmill.class_names"
"""Key of the file's metadata for the class names: a JSON list, class number = position."""
IMAGE_KEY = "shardmill.image"
"""Beside it, a JSON object: how the bytes in `image` are encoded, and the array that they decode to; its shape is null
if images differ in it, and then in the columns `height` and `width`."""

_MAGIC_BYTES = 4
# Name and number of each column of ours that readers read.
_READ_COLUMNS = {"image": 0, "sample_id": 1, "label": 2, "source": 5}


def parquet_schema(schema: RowSchema) -> pa.Schema:
    """Columns that pandas, Spark and Petastorm read as they are (so no unsigned integers)."""
    if not schema.has_images:
        return _schema_of_predictions(schema)
    image = pa.binary()
    if ENCODINGS[schema.encoding].is_fixed_size and schema.one_shape_HWC is not None:
        image = pa.binary(math.prod(schema.one_shape_HWC))
    fields = [
        pa.field("image", image, nullable=False),
        *_id_and_label(schema),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("width", pa.int32(), nullable=False),
        *_source_and_extra(schema),
    ]
    # So that a file alone explains the numbers in `label` and the bytes in `image`.
    metadata = {
        CLASS_NAMES_KEY: json.dumps(schema.class_names, ensure_ascii=False),
        IMAGE_KEY: json.dumps({"encoding": schema.encoding, "dtype": "uint8", "shape_HWC": schema.one_shape_HWC}),
    }
    return pa.schema(fields, metadata=metadata)


def _schema_of_predictions(schema: RowSchema) -> pa.Schema:
    vector = [pa.field(VECTOR, pa.list_(pa.float32()), nullable=False)] if schema.vector_size else []
    fields = [*_id_and_label(schema), *_source_and_extra(schema), *vector]
    return pa.schema(fields, metadata={CLASS_NAMES_KEY: json.dumps(schema.class_names, ensure_ascii=False)})


def _id_and_label(schema: RowSchema) -> list[pa.Field]:
    return [
        pa.field("sample_id", pa.int64(), nullable=False),
        pa.field("label", arrow_type(schema.label_type), nullable=schema.has_class and not schema.class_names),
    ]


def _source_and_extra(schema: RowSchema) -> list[pa.Field]:
    return [
        *(pa.field(name, pa.string(), nullable=False) for name in ("source", "source_sha256", "notes")),
        *(pa.field(column.name, arrow_type(column.type)) for column in schema.extra),
    ]


def column_types(schema: RowSchema) -> dict[str, str]:
    """The columns of a dataset and the names of their types, as its manifest has them."""
    ours = {field.name: str(field.type) for field in parquet_schema(replace(schema, extra=()))}
    if schema.vector_size:
        ours[VECTOR] = f"float32[{schema.vector_size}]"
    return ours | {"label": schema.label_type} | {column.name: column.type for column in schema.extra}


def write_shard(file: IO[bytes], chunks: Sequence[Sequence[StoredRow]], schema: RowSchema) -> WrittenShard:
    """Write all chunks as row groups of one file."""
    arrow_schema = parquet_schema(schema)
    # One page for each column of a row group, so that its images lie in one run of bytes.
    with pq.ParquetWriter(
        file,
        arrow_schema,
        compression="NONE",
        use_dictionary=False,
        write_statistics=False,
        data_page_size=1 << 30,
        write_batch_size=1 << 24,
    ) as writer:
        for chunk in chunks:
            writer.write_table(_table(chunk, arrow_schema, schema), row_group_size=len(chunk))
    return _locate(file, len(chunks), arrow_schema.names[0])


def open_footer(footer: ByteRange, data: bytes) -> object:
    """The parsed file metadata of a shard whose last bytes are `data`."""
    try:
        return pq.read_metadata(_SparseFile(footer.start + footer.num_bytes, {footer.start: data}))
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"Parquet footer does not parse: {error}") from None


def read_chunk(
    footer: object, chunk_in_shard: int, place: ByteRange, data: bytes | memoryview, schema: RowSchema
) -> ChunkRows:
    """Decode one row group from its bytes; images are views of `data`."""
    assert isinstance(footer, pq.FileMetaData)
    if not schema.has_images:
        return _read_predictions(footer, chunk_in_shard, place, data, schema)
    try:
        pages = {
            name: find_page(footer, chunk_in_shard, place, data, number, name) for name, number in _READ_COLUMNS.items()
        }
        if not schema.has_class:
            pages["label"] = None
        table = _read_columns(
            footer, chunk_in_shard, place, data,
            [*(name for name, page in pages.items() if page is None), *(column.name for column in schema.extra)],
        )  # fmt: skip
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"Parquet row group {chunk_in_shard} does not parse: {error}") from None
    image, sample_id, label, source = pages.values()
    return ChunkRows(
        images=image.slices() if image else _slices(table["image"]),
        labels_N=label.integers() if label else _labels(table["label"], schema),
        sample_ids_N=sample_id.integers() if sample_id else table["sample_id"].to_numpy(),
        sources=Texts(source.slices, source.num_values) if source else table["source"].to_pylist(),
        extra={column.name: table[column.name].to_pylist() for column in schema.extra},
    )


def _read_predictions(
    footer: pq.FileMetaData, row_group: int, place: ByteRange, data: bytes | memoryview, schema: RowSchema
) -> ChunkRows:
    """Like `read_chunk`; the bytes of a row's vector are in place of an image."""
    extra, vector = [column.name for column in schema.extra], [VECTOR] if schema.vector_size else []
    try:
        table = _read_columns(footer, row_group, place, data, ["sample_id", "label", "source", *extra, *vector])
    except (pa.ArrowException, OSError) as error:
        raise IntegrityError(f"Parquet row group {row_group} does not parse: {error}") from None
    num_rows = len(table["sample_id"])
    numbers_N = np.empty(0, "<f4")
    if vector:
        numbers_N = table[VECTOR].combine_chunks().flatten().to_numpy().astype("<f4", copy=False)
        if len(numbers_N) != num_rows * schema.vector_size:
            raise IntegrityError(f"Parquet row group {row_group} has vectors of another length")
    bounds = np.arange(num_rows + 1, dtype=np.int64) * (4 * schema.vector_size)
    return ChunkRows(
        images=Slices(numbers_N.tobytes(), bounds[:-1], bounds[1:]),
        labels_N=_labels(table["label"], schema),
        sample_ids_N=table["sample_id"].to_numpy(),
        sources=table["source"].to_pylist(),
        extra={name: table[name].to_pylist() for name in extra},
    )


PARQUET = ShardFormat("parquet", write_shard, open_footer, read_chunk, takes_views=True)


def _read_columns(
    footer: pq.FileMetaData, row_group: int, place: ByteRange, data: bytes | memoryview, names: Sequence[str]
) -> Mapping[str, pa.ChunkedArray]:
    """What Arrow makes of some columns; not asked for none, because it parses all that there is."""
    if not names:
        return {}
    source = _SparseFile(place.start + place.num_bytes, {place.start: data})
    file = pq.ParquetFile(source, metadata=footer, pre_buffer=False)
    table = file.read_row_group(row_group, columns=list(names), use_threads=False)
    if table.num_rows != footer.row_group(row_group).num_rows:
        raise IntegrityError(f"Parquet row group {row_group} has {table.num_rows} rows", "its footer counts others")
    return {name: table.column(name) for name in names}


def _labels(column: pa.ChunkedArray, schema: RowSchema) -> np.ndarray:
    if schema.has_class:
        return column.fill_null(-1).to_numpy().astype(np.int64)
    return label_array(column.to_pylist(), schema.label_type)


def _table(chunk: Sequence[StoredRow], schema: pa.Schema, rows: RowSchema) -> pa.Table:
    samples = [row.sample for row in chunk]
    columns = {
        "image": [sample.image for sample in samples],
        "sample_id": [row.source.sample_id for row in chunk],
        "label": rows.labels_of(chunk),
        "height": [sample.height for sample in samples],
        "width": [sample.width for sample in samples],
        "source": [row.source.key for row in chunk],
        "source_sha256": [sample.source_sha256 for sample in samples],
        "notes": [",".join(sample.notes) for sample in samples],
    }
    if rows.vector_size:
        columns[VECTOR] = list(np.frombuffer(b"".join(columns["image"]), "<f4").reshape(len(chunk), -1))
    if rows.extra:
        values = rows.values_of(row.source.extra for row in chunk)
        columns |= {column.name: [each[column.name] for each in values] for column in rows.extra}
    if rows.has_mask:
        columns[MASK] = [row.mask for row in chunk]
    return pa.table([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _locate(file: IO[bytes], num_chunks: int, first_column: str) -> WrittenShard:
    """Byte ranges of row groups and footer, from the file's own metadata."""
    metadata = pq.read_metadata(file)
    file_bytes = file.seek(0, io.SEEK_END)
    # The file ends with the footer, its length in 4 bytes, and the magic.
    footer_start = file_bytes - 2 * _MAGIC_BYTES - metadata.serialized_size
    firsts = [metadata.row_group(number).column(0) for number in range(num_chunks)]
    # A row group reaches to the next one: pyarrow may leave a copy of a column's metadata behind the column.
    bounds = [first.data_page_offset for first in firsts] + [footer_start]
    assert bounds[0] == _MAGIC_BYTES and all(first.path_in_schema == first_column for first in firsts)
    places = [ByteRange(start, stop - start) for start, stop in itertools.pairwise(bounds)]
    return WrittenShard(tuple(places), ByteRange(footer_start, file_bytes - footer_start))


def _slices(column: pa.ChunkedArray) -> Slices:
    """The values of a column in Arrow's buffer: no copy."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    if pa.types.is_fixed_size_binary(array.type):
        bounds = np.arange(array.offset, array.offset + len(array) + 1, dtype=np.int64) * array.type.byte_width
    else:
        offsets = np.frombuffer(array.buffers()[1], dtype=np.int32)
        bounds = offsets[array.offset : array.offset + len(array) + 1].astype(np.int64)
    return Slices(memoryview(array.buffers()[-1]).cast("B"), bounds[:-1], bounds[1:])


class _SparseFile(io.RawIOBase):
    """A file of which only some runs of bytes were fetched; pyarrow seeks in it as in the whole shard."""

    def __init__(self, num_bytes: int, runs: Mapping[int, bytes | memoryview]) -> None:
        self._num_bytes = num_bytes
        self._runs = runs
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        self._position = origin + offset
        return self._position

    def size(self) -> int:
        return self._num_bytes

    def read(self, num_bytes: int = -1) -> bytes | memoryview:
        stop = self._num_bytes if num_bytes is None or num_bytes < 0 else self._position + num_bytes
        stop = min(stop, self._num_bytes)
        start, self._position = self._position, max(self._position, stop)
        for run_start, run in self._runs.items():
            if run_start <= start and stop <= run_start + len(run):
                return memoryview(run)[start - run_start : stop - run_start]
        # pyarrow reads ahead of a footer; what was not fetched is never looked at.
        filled = bytearray(max(0, stop - start))
        for run_start, run in self._runs.items():
            low, high = max(start, run_start), min(stop, run_start + len(run))
            if low < high:
                filled[low - start : high - start] = run[low - run_start : high - run_start]
        return bytes(filled)


_LENGTH = struct.Struct("<I")
# How the header of a data page begins: field 1, its type, is 0, and then comes field 2, its size.
_DATA_PAGE = b"\x15\x00\x15"
_MAX_PAGE_HEADER_BYTES = 64
# The second one is of the levels, which a column without nulls does not have.
_PLAIN_ENCODINGS = {"PLAIN", "RLE"}


@dataclass(frozen=True, slots=True)
class PlainPage:
    """The only data page of a column in one row group."""

    data: bytes | memoryview
    first: int
    """Where its values begin."""
    end: int
    num_values: int
    kind: pq.ColumnSchema

    def integers(self) -> np.ndarray:
        """The values of a column of int64."""
        self._check_size(8)
        return np.frombuffer(self.data, dtype="<i8", count=self.num_values, offset=self.first)

    def slices(self) -> Slices:
        """Where the values of a column of bytes lie. Raises IntegrityError if their lengths do not add up."""
        if self.kind.physical_type == "BYTE_ARRAY":
            return self._with_lengths()
        self._check_size(self.kind.length)
        starts_N = np.arange(self.first, self.end, self.kind.length, dtype=np.int64)
        return Slices(self.data, starts_N, starts_N + self.kind.length)

    def _with_lengths(self) -> Slices:
        """Values that follow their lengths, 4 bytes each, little-endian."""
        data, starts, stop, length_at = self.data, [], self.first, _LENGTH.unpack_from
        for _ in range(self.num_values):
            start = stop + _LENGTH.size
            if start > self.end:
                break
            starts.append(start)
            stop = start + length_at(data, stop)[0]
        if stop != self.end or len(starts) != self.num_values:
            raise IntegrityError(
                f"the lengths in column {self.kind.name} of a Parquet row group do not add up to its page"
            )
        starts_N = np.array(starts, dtype=np.int64)
        return Slices(data, starts_N, np.append(starts_N[1:] - _LENGTH.size, self.end))

    def _check_size(self, value_bytes: int) -> None:
        if value_bytes * self.num_values != self.end - self.first:
            raise IntegrityError(
                f"column {self.kind.name} of a Parquet row group does not have {self.num_values} values"
            )


def find_page(
    footer: pq.FileMetaData, row_group: int, place: ByteRange, data: bytes | memoryview, column: int, name: str
) -> PlainPage | None:
    """The page of a column, if that has this name and one plain page; `data` are the row group's bytes."""
    found, kind = footer.row_group(row_group).column(column), footer.schema.column(column)
    is_plain = found.compression == "UNCOMPRESSED" and not found.has_dictionary_page
    if not is_plain or kind.path != name or kind.max_definition_level or kind.max_repetition_level:
        return None
    begin = found.data_page_offset - place.start
    end = begin + found.total_compressed_size
    if not 0 <= begin < end <= len(data) or not _PLAIN_ENCODINGS.issuperset(found.encodings):
        return None
    # All that the column has beside its one page is that page's header.
    first = end - _page_bytes(bytes(data[begin : begin + _MAX_PAGE_HEADER_BYTES]))
    if not begin < first <= begin + _MAX_PAGE_HEADER_BYTES:
        return None
    return PlainPage(data, first, end, found.num_values, kind)


def _page_bytes(header: bytes) -> int:
    """The size that a data page's header states; 0 for another header.

    `PageHeader` of parquet.thrift in Thrift's compact protocol: 7 bits of a number in each byte, the lowest first, and
    its sign in the last bit (zigzag).
    """
    number = 0
    if header.startswith(_DATA_PAGE):
        for place, byte in enumerate(header[len(_DATA_PAGE) :]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return number >> 1
    return 0
