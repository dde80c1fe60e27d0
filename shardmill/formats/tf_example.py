"""tf.Example messages without TensorFlow: the few lines of protocol buffers that a TFRecord shard, and TensorBoard's
events, need.

Message: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/example.proto. Wire format:
https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardmill.errors import IntegrityError

# Feature is a oneof of these.
BYTES_LIST, FLOAT_LIST, INT64_LIST = 1, 2, 3
_MAX_VARINT_BYTES = 10


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


ValueRange = tuple[int, int]
"""Where a value begins in the bytes of a chunk, and where it ends."""


def find_values(data: bytes | memoryview, start: int, stop: int, wanted: Collection[bytes]) -> dict[bytes, ValueRange]:
    """Where the first value of each wanted feature lies: of bytes themselves, of an int64 its varint.

    `data[start:stop]` is a tf.Example; features without a value are left out. Of the others it looks at the names
    alone. Raises IntegrityError if that is not a tf.Example.
    """
    found: dict[bytes, ValueRange] = {}
    try:
        while start < stop:
            features, features_end = _field_of(data, start, stop)
            while features < features_end:
                entry, entry_end = _field_of(data, features, features_end)
                name, name_end = _field_of(data, entry, entry_end)
                features = entry_end
                text = bytes(data[name:name_end])
                if text in wanted:
                    values, values_end = _field_of(data, *_field_of(data, name_end, entry_end))
                    if values < values_end:
                        # An integer has a tag of its own, or is the first of those that are packed.
                        is_single = data[values] & 7 == VARINT
                        found[text] = (values + 1, values_end) if is_single else _field_of(data, values, values_end)
            start = features_end
    except IndexError:
        raise IntegrityError("a record is not a tf.Example: a field reaches past the end") from None
    return found


def integers_at(data: bytes | memoryview, places: np.ndarray) -> np.ndarray:
    """The integers whose varints begin at `places[n, 0]`, int64; -1 where that is -1."""
    bytes_M = np.frombuffer(data, dtype=np.uint8)
    starts_N = places[:, 0]
    is_open_N = starts_N >= 0
    values_N = np.zeros(len(starts_N), dtype=np.uint64)
    for place in range(_MAX_VARINT_BYTES):
        bytes_N = bytes_M[np.minimum(starts_N + place, len(bytes_M) - 1)].astype(np.uint64)
        values_N |= np.where(is_open_N, bytes_N & np.uint64(0x7F), np.uint64(0)) << np.uint64(7 * place)
        is_open_N = is_open_N & (bytes_N >= np.uint64(0x80))
    return np.where(starts_N < 0, -1, values_N.view(np.int64))


def _field_of(data: bytes | memoryview, position: int, end: int) -> ValueRange:
    """Where the payload of a message's next length-delimited field lies."""
    while True:
        tag, position = data[position], position + 1
        # Of a message of ours each tag is one byte: the number of a field is below 16.
        if tag > 0x7F:
            tag, position = _read_varint(data, position - 1)
        if tag & 7 != VARINT:
            break
        _, position = _read_varint(data, position)
    if tag & 7 != LENGTH_DELIMITED:
        raise IntegrityError(f"a record is not a tf.Example: unexpected wire type {tag & 7}")
    length, position = data[position], position + 1
    if length > 0x7F:
        length, position = _read_varint(data, position - 1)
    if position + length > end:
        raise IntegrityError("a record is not a tf.Example: a field reaches past the end")
    return position, position + length


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


def _read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
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


VARINT, EIGHT_BYTES, LENGTH_DELIMITED, FOUR_BYTES = 0, 1, 2, 5


def bytes_field(number: int, payload: bytes) -> bytes:
    """Encode a field of bytes, of a string in UTF-8, or of another message."""
    return varint(number << 3 | LENGTH_DELIMITED) + varint(len(payload)) + payload


def integer_field(number: int, value: int) -> bytes:
    """Encode a field of an int64 or an enum."""
    return varint(number << 3 | VARINT) + varint(value & 0xFFFFFFFFFFFFFFFF)


def double_field(number: int, value: float) -> bytes:
    """Encode a field of a 64-bit float."""
    return varint(number << 3 | EIGHT_BYTES) + struct.pack("<d", value)


def float_field(number: int, value: float) -> bytes:
    """Encode a field of a 32-bit float; values beyond its range become infinite."""
    try:
        payload = struct.pack("<f", value)
    except OverflowError:
        payload = struct.pack("<f", math.copysign(math.inf, value))
    return varint(number << 3 | FOUR_BYTES) + payload


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest ones first; for numbers from 0 on."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
