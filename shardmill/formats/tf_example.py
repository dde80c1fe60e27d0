"""tf.Example messages without TensorFlow: the few lines of protocol buffers that a TFRecord shard needs.

Message: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardmill.errors import IntegrityError
from shardmill.formats.protobuf import FOUR_BYTES, LENGTH_DELIMITED, VARINT, bytes_field, varint

# Feature is a oneof of these.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3


@dataclass(frozen=True, slots=True)
class FeatureList:
    """All values of one feature: bytes, floats (of 32 bits) or integers, as its kind says."""

    kind: int
    values: Sequence


FeatureValue = bytes | int | FeatureList


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """A serialized tf.Example with the features in the order given (so equal input, equal bytes)."""
    entries = b"".join(
        bytes_field(1, bytes_field(1, name.encode()) + bytes_field(2, _encode_feature(value)))
        for name, value in features.items()
    )
    return bytes_field(1, entries)


def decode_example(data: memoryview) -> dict[str, bytes | memoryview | int]:
    """The first value of each bytes or int64 feature that has one. Raises IntegrityError if `data` is not
    a tf.Example.
    """
    found: dict[str, bytes | memoryview | int] = {}
    try:
        for _, features in _fields(data):
            for _, entry in _fields(features):
                name, feature = (value for _, value in _fields(entry))
                for kind, values in _fields(feature):
                    if len(values) and kind == BYTES_LIST:
                        found[bytes(name).decode()] = next(value for _, value in _fields(values))
                    elif len(values) and kind == INT64_LIST:
                        found[bytes(name).decode()] = _first_integer(values)
    except (IndexError, ValueError, StopIteration, TypeError) as error:
        raise IntegrityError(f"a record is not a tf.Example: {error}") from None
    return found


def decode_lists(data: memoryview, wanted: Collection[str] | None = None) -> dict[str, FeatureList]:
    """All values of every feature, or of those `wanted`, empty ones included.

    Raises IntegrityError if `data` is not a tf.Example.
    """
    found: dict[str, FeatureList] = {}
    try:
        for _, features in _fields(data):
            for _, entry in _fields(features):
                name, feature = (value for _, value in _fields(entry))
                text = bytes(name).decode()
                for kind, values in _fields(feature) if wanted is None or text in wanted else ():
                    found[text] = FeatureList(kind, _READERS[kind](values))
    except (IndexError, ValueError, KeyError, struct.error) as error:
        raise IntegrityError(f"a record is not a tf.Example: {error}") from None
    return found


def _integers(values: memoryview) -> Iterator[int]:
    """Of an int64_list: packed, or each with a tag of its own."""
    position = 0
    while position < len(values):
        tag, position = _read_varint(values, position)
        if tag & 7 == LENGTH_DELIMITED:
            length, position = _read_varint(values, position)
            end = position + length
        else:
            end = position + 1
        while position < end:
            value, position = _read_varint(values, position)
            yield value - (1 << 64) if value >> 63 else value


def _floats(values: memoryview) -> Iterator[float]:
    """Of a float_list: packed, or each with a tag of its own."""
    position = 0
    while position < len(values):
        tag, position = _read_varint(values, position)
        length, position = (4, position) if tag & 7 == FOUR_BYTES else _read_varint(values, position)
        yield from (value for (value,) in struct.iter_unpack("<f", values[position : position + length]))
        position += length


_READERS = {
    BYTES_LIST: lambda values: [value for _, value in _fields(values)],
    FLOAT_LIST: lambda values: list(_floats(values)),
    INT64_LIST: lambda values: list(_integers(values)),
}


def _first_integer(values: memoryview) -> int:
    """Of an int64_list: packed as we and TensorFlow write it, or one varint after the other."""
    tag, position = _read_varint(values, 0)
    if tag & 7 == LENGTH_DELIMITED:
        _, position = _read_varint(values, position)
    value, _ = _read_varint(values, position)
    return value - (1 << 64) if value >> 63 else value


def _encode_feature(value: FeatureValue) -> bytes:
    if isinstance(value, FeatureList):
        return bytes_field(value.kind, _encode_list(value))
    if isinstance(value, bytes):
        return bytes_field(BYTES_LIST, bytes_field(1, value))
    return bytes_field(INT64_LIST, _encode_list(FeatureList(INT64_LIST, [value])))


def _encode_list(feature: FeatureList) -> bytes:
    if not feature.values:
        return b""  # as protocol buffers write it
    if feature.kind == BYTES_LIST:
        return b"".join(bytes_field(1, value) for value in feature.values)
    if feature.kind == FLOAT_LIST:
        return bytes_field(1, struct.pack(f"<{len(feature.values)}f", *feature.values))
    # int64_list is packed; negative numbers are their 64-bit two's complement.
    return bytes_field(1, b"".join(varint(value & 0xFFFFFFFFFFFFFFFF) for value in feature.values))


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position += 1
        if byte < 0x80:
            return value, position
        shift += 7


def _fields(data: memoryview):
    """(number, payload) of each length-delimited field of a message."""
    position = 0
    while position < len(data):
        tag, position = _read_varint(data, position)
        if tag & 7 == VARINT:
            _, position = _read_varint(data, position)
            continue
        if tag & 7 != LENGTH_DELIMITED:
            raise ValueError(f"unexpected wire type {tag & 7}")
        length, position = _read_varint(data, position)
        if position + length > len(data):
            raise ValueError("a field reaches past the end")
        yield tag >> 3, data[position : position + length]
        position += length
