"""tf.Example messages without TensorFlow: the few lines of protocol buffers that a TFRecord shard needs.

Message: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto
Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Mapping

from shardmill.errors import IntegrityError

_VARINT, _LENGTH_DELIMITED = 0, 2
# Feature is a oneof: bytes_list = 1, float_list = 2, int64_list = 3.
_BYTES_LIST, _INT64_LIST = 1, 3

FeatureValue = bytes | int


def encode_example(features: Mapping[str, FeatureValue]) -> bytes:
    """A serialized tf.Example with one value in each feature, in the order given (so equal input, equal bytes)."""
    entries = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _encode_feature(value))) for name, value in features.items()
    )
    return _field(1, entries)


def decode_example(data: memoryview) -> dict[str, bytes | memoryview | int]:
    """The first value of each bytes or int64 feature that has one. Raises IntegrityError if `data` is no tf.Example."""
    found: dict[str, bytes | memoryview | int] = {}
    try:
        for _, features in _fields(data):
            for _, entry in _fields(features):
                name, feature = (value for _, value in _fields(entry))
                for kind, values in _fields(feature):
                    if len(values) and kind == _BYTES_LIST:
                        found[bytes(name).decode()] = next(value for _, value in _fields(values))
                    elif len(values) and kind == _INT64_LIST:
                        found[bytes(name).decode()] = _first_integer(values)
    except (IndexError, ValueError, StopIteration, TypeError) as error:
        raise IntegrityError(f"a record is not a tf.Example: {error}") from None
    return found


def _first_integer(values: memoryview) -> int:
    """Of an int64_list: packed as we and TensorFlow write it, or one varint after the other."""
    tag, position = _read_varint(values, 0)
    if tag & 7 == _LENGTH_DELIMITED:
        _, position = _read_varint(values, position)
    value, _ = _read_varint(values, position)
    return value - (1 << 64) if value >> 63 else value


def _encode_feature(value: FeatureValue) -> bytes:
    if isinstance(value, bytes):
        return _field(_BYTES_LIST, _field(1, value))
    # int64_list is packed; negative numbers are their 64-bit two's complement.
    return _field(_INT64_LIST, _field(1, _varint(value & 0xFFFFFFFFFFFFFFFF)))


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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
        if tag & 7 == _VARINT:
            _, position = _read_varint(data, position)
            continue
        if tag & 7 != _LENGTH_DELIMITED:
            raise ValueError(f"unexpected wire type {tag & 7}")
        length, position = _read_varint(data, position)
        if position + length > len(data):
            raise ValueError("a field reaches past the end")
        yield tag >> 3, data[position : position + length]
        position += length
