"""A message through a pipe: whole however it comes, or nothing."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import threading
from typing import IO, Any, cast

import pytest

from shardmill.child_process import LENGTHS, ChildDied, ChildProcess, ended, pack_message, read_message, start_python

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


def test_a_message_that_a_pipe_does_not_hold_waits_for_its_reader():
    (requests_out, requests), (answers, answers_in) = os.pipe(), os.pipe()
    child, received = ChildProcess(0, requests, answers, lambda seconds: None), list[Any]()
    with os.fdopen(requests_out, "rb") as reader:
        thread = threading.Thread(target=lambda: received.append(read_message(reader)))
        thread.start()
        child.send({"key": "a"}, b"x" * 1_000_000)
        thread.join(60)
    assert received == [({"key": "a"}, b"x" * 1_000_000)]
    child.end()
    os.close(answers_in)


@pytest.mark.parametrize(("status", "words"), [(None, "closes its pipe"), (-9, "exit status -9")])
def test_a_child_that_died_says_how(status: int | None, words: str):
    assert str(ChildDied(status)) == words


@pytest.mark.starts("program")
@pytest.mark.parametrize("own_session", [False, True])
def test_ctrl_c_waits_for_a_child_of_this_session_alone_and_one_that_stays_is_killed(own_session: bool):
    code = "import signal, time; print(signal.SIGINT in signal.pthread_sigmask(0, ()), flush=True); time.sleep(60)"
    begun = start_python(
        ["-c", code], dict(os.environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, own_session=own_session
    )
    with begun:
        assert begun.stdout is not None and begun.stdout.readline() == f"{not own_session}\n".encode()
        assert ended(begun, 0.0) is None and begun.returncode == -signal.SIGKILL
