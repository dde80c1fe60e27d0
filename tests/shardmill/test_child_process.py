"""A message through a pipe: whole however it comes, or nothing."""

from __future__ import annotations

import io
from typing import IO, Any, cast

import pytest

from shardmill.child_process import LENGTHS, pack_message, read_message

MESSAGE = ({"key": "é", "size": 3}, b"\0\1\2")


class Dribbling:
    """A pipe without a buffer: a byte at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, num_bytes: int) -> bytes:
        return self._data.read(min(num_bytes, 1))


def bytes_of(header: dict[str, Any], body: bytes) -> bytes:
    begin, packed_body = pack_message(header, body)
    # Not copied.
    assert packed_body is body
    return begin + packed_body


@pytest.mark.parametrize("kind", [io.BytesIO, Dribbling])
def test_messages_come_one_after_the_other_and_then_none(kind):
    messages = [MESSAGE, ({}, b""), ({"n": [1, None]}, b"x" * 70_000)]
    pipe = cast("IO[bytes]", kind(b"".join(bytes_of(*each) for each in messages)))
    assert [read_message(pipe) for _ in messages] == messages
    assert read_message(pipe) is None


def test_lengths_are_those_of_header_and_body():
    data = bytes_of(*MESSAGE)
    header_bytes, body_bytes = LENGTHS.unpack_from(data)
    assert (header_bytes, body_bytes, len(data)) == (len(data) - LENGTHS.size - 3, 3, LENGTHS.size + header_bytes + 3)


@pytest.mark.parametrize("kind", [io.BytesIO, Dribbling])
def test_a_message_whose_sender_died_inside_it_is_dropped(kind):
    data = bytes_of(*MESSAGE)
    for end in range(len(data)):
        assert read_message(cast("IO[bytes]", kind(data[:end]))) is None, end
