"""Reads and writes fields of protocol buffers messages, for tf.Example records and TensorBoard's events.

Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import math
import struct

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
