"""Messages between a process and its child over pipes: two lengths, a JSON header, raw bytes. Nothing is unpickled."""

from __future__ import annotations

import json
import struct
from typing import IO, Any

LENGTHS = struct.Struct("<IQ")
"""Bytes of the header and of the body, before both."""


def pack_message(header: dict[str, Any], body: bytes) -> tuple[bytes, bytes]:
    """Header and body, to be written one after the other: a large body is not copied."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text, body


def read_message(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes] | None:
    """The next message, or None if the other side closed its end, or died in the middle of one."""
    lengths = _read(pipe, LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    header, body = _read(pipe, header_bytes), _read(pipe, body_bytes)
    return (json.loads(header), body) if len(header) + len(body) == header_bytes + body_bytes else None


def _read(pipe: IO[bytes], num_bytes: int) -> bytes:
    """Fewer at the end; a pipe without a buffer gives what is there, time after time."""
    data = pipe.read(num_bytes)
    while len(data) < num_bytes and (more := pipe.read(num_bytes - len(data))):
        data += more
    return data
