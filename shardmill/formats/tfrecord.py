"""TFRecord shards: a chunk is a run of records, each a tf.Example with the usual image keys.

Framing: length (u64 LE), masked CRC-32C of the length, data, masked CRC-32C of the data
(https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details). A file that was cut between two
records is valid TFRecord; only the index shows the loss, because it counts each chunk's rows and bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import IO

import google_crc32c
import numpy as np

from shardmill.errors import IntegrityError
from shardmill.formats.rows import ByteRange, ChunkRows, RowSchema, ShardFormat, Slices, StoredRow, Texts, WrittenShard
from shardmill.formats.tf_example import (
    BYTES_LIST,
    FLOAT_LIST,
    INT64_LIST,
    FeatureList,
    FeatureValue,
    ValueRange,
    decode_lists,
    encode_example,
    find_values,
    integers_at,
)
from shardmill.kernel import shardmill_native
from shardmill.typed_columns import LABEL_TYPES, MASK, MASK_TYPE, label_array, scalar_of, vector_size
from shardmill.values import Value

_native_find_values = getattr(shardmill_native, "find_values", None)

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_KINDS = {
    "int64": INT64_LIST, "bool": INT64_LIST, "float32": FLOAT_LIST, "float64": FLOAT_LIST, "string": BYTES_LIST,
    MASK_TYPE: BYTES_LIST,
}  # fmt: skip
_FROM_FEATURE = {
    "int64": int,
    "bool": bool,
    "float32": float,
    "float64": float,
    "string": lambda value: bytes(value).decode("utf-8", "replace"),
    MASK_TYPE: bytes,
}


def write_shard(file: IO[bytes], chunks: Sequence[Sequence[StoredRow]], schema: RowSchema) -> WrittenShard:
    """Write all chunks one after the other; there is no footer."""
    places: list[ByteRange] = []
    position = 0
    for chunk in chunks:
        chunk_start = position
        for row in chunk:
            record = frame(encode_example(_features(row, schema)))
            file.write(record)
            position += len(record)
        places.append(ByteRange(chunk_start, position - chunk_start))
    return WrittenShard(tuple(places), ByteRange(position, 0))


def open_footer(footer: ByteRange, data: bytes) -> object:
    """TFRecord has no footer."""
    return None


_READ_FEATURES = (b"image/encoded", b"image/filename", b"image/sample_id", b"image/class/label")
_NUM_REQUIRED = 3


def read_chunk(
    footer: object, chunk_in_shard: int, place: ByteRange, data: bytes | memoryview, schema: RowSchema
) -> ChunkRows:
    """Decode one run of records; their own CRCs are covered by the chunk's."""
    places = _find_all(data, _READ_FEATURES)
    for number, name in enumerate(_READ_FEATURES[:_NUM_REQUIRED]):
        if (places[:, number, 0] < 0).any():
            raise IntegrityError(f"TFRecord chunk {chunk_in_shard} lacks the feature {name.decode()!r}")
    images, sources, sample_ids, labels = (places[:, number] for number in range(len(_READ_FEATURES)))
    lists = [decode_lists(memoryview(data)[start:stop]) for start, stop in _records(data)] if schema.has_values else []
    return ChunkRows(
        images=Slices(data, images[:, 0], images[:, 1]),
        labels_N=integers_at(data, labels) if schema.has_class else _labels(lists, schema),
        sample_ids_N=integers_at(data, sample_ids),
        sources=Texts(partial(Slices, data, sources[:, 0], sources[:, 1]), len(sources)),
        extra={
            column.name: [_value_of(features.get(column.name), column.type) for features in lists]
            for column in schema.extra
        },
    )


# Python looks at single bytes, for which bytes are faster than a view of them.
TFRECORD = ShardFormat("tfrecord", write_shard, open_footer, read_chunk, takes_views=_native_find_values is not None)


def _find_all(data: bytes | memoryview, names: tuple[bytes, ...]) -> np.ndarray:
    """Where the first value of each feature lies, record by record: int64, records x names x 2; -1 if there is none."""
    found = _native_find_values(data, names) if _native_find_values is not None else None
    if found is not None:
        return np.frombuffer(found, dtype=np.int64).reshape(-1, len(names), 2)
    # Without the kernel; and it leaves to us to say what is wrong.
    wanted = frozenset(names)
    examples = [find_values(data, start, stop, wanted) for start, stop in _records(data)]
    places = [[example.get(name, (-1, -1)) for name in names] for example in examples]
    return np.array(places, dtype=np.int64).reshape(-1, len(names), 2)


def _labels(examples: list[dict[str, FeatureList]], schema: RowSchema) -> np.ndarray:
    """Labels that are not classes."""
    found = [_value_of(example.get(_label_feature(schema)), _list_type(schema.label_type)) for example in examples]
    return label_array(found, schema.label_type)


def _features(row: StoredRow, schema: RowSchema) -> dict[str, FeatureValue]:
    sample = row.sample
    features: dict[str, FeatureValue] = {
        "image/encoded": sample.image,
        "image/format": schema.encoding.encode(),
        "image/height": sample.height,
        "image/width": sample.width,
        "image/channels": sample.channels,
        "image/filename": row.source.key.encode(),
        "image/key/sha256": sample.source_sha256.encode(),
        "image/notes": ",".join(sample.notes).encode(),
        "image/sample_id": row.source.sample_id,
    }
    if row.label_id is not None:
        features["image/class/label"] = row.label_id
        features["image/class/text"] = (row.source.label or "").encode()
    if not schema.has_class:
        features[_label_feature(schema)] = _feature_of(schema.labels_of([row])[0], _list_type(schema.label_type))
    [values] = schema.values_of([row.source.extra])
    masks: dict[str, FeatureValue] = {MASK: row.mask} if schema.has_mask else {}
    # A null is a feature that is not there.
    present = (each for each in schema.extra if values[each.name] is not None and each.type != MASK_TYPE)
    return features | {column.name: _feature_of(values[column.name], column.type) for column in present} | masks


def _label_feature(schema: RowSchema) -> str:
    return "image/class/label" if schema.label_type == LABEL_TYPES["multi_label"] else "image/label"


def _list_type(label_type: str) -> str:
    return "list<float32>" if vector_size(label_type) else label_type


def _feature_of(value: Value, type_name: str) -> FeatureList:
    """A typed value; tf.Example has neither bool nor float64, so these become int64 and float32."""
    values: list = value if isinstance(value, list) else [value]
    kind = _KINDS[scalar_of(type_name)]
    return FeatureList(kind, [each.encode() for each in values] if kind == BYTES_LIST else values)


def _value_of(feature: FeatureList | None, type_name: str) -> Value:
    """Decode the value of `_feature_of`. Raises IntegrityError for a feature of another kind or number of values."""
    if feature is None:
        return None
    is_list, scalar = type_name.startswith("list<"), scalar_of(type_name)
    if feature.kind != _KINDS[scalar] or not (is_list or len(feature.values) == 1):
        raise IntegrityError(f"a feature is not a {type_name}")
    values: list = [_FROM_FEATURE[scalar](each) for each in feature.values]
    return values if is_list else values[0]


def frame(data: bytes) -> bytes:
    """A record with its length and checksums, as stored in a file."""
    length = struct.pack("<Q", len(data))
    return length + _FOOTER.pack(masked_crc(length)) + data + _FOOTER.pack(masked_crc(data))


def masked_crc(data: bytes | memoryview) -> int:
    """The checksum behind a record's length and data: a rotated CRC-32C plus a constant, as TensorFlow defines it."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _records(data: bytes | memoryview) -> Iterator[ValueRange]:
    """Where the message of each record lies."""
    position, num_bytes = 0, len(data)
    while position < num_bytes:
        if position + _HEADER.size > num_bytes:
            raise IntegrityError("a TFRecord chunk ends inside a record's header")
        start = position + _HEADER.size
        stop = start + _HEADER.unpack_from(data, position)[0]
        position = stop + _FOOTER.size
        if position > num_bytes:
            raise IntegrityError("a TFRecord chunk ends inside a record")
        yield start, stop
