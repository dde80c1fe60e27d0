"""The process of a `UnitRunner`: work units in by a pipe, results out, until the pipe is closed."""

from __future__ import annotations

import os
import signal
import sys

from etl.engines.unit_json import decode_task, decode_unit
from etl.write_unit import write_unit
from shardmill.dataset.unit_result import encode_unit_result
from shardmill.errors import ShardmillError
from shardmill.images.own_process import OwnProcessDecoder
from shardmill.messages import pack_message, read_message
from shardmill.parent_death import die_with_parent


def main() -> None:
    """`argv`: ..., the parent's process id. The first message is the task, each further one a work unit."""
    # Ctrl-C and a scheduler's SIGTERM go to the whole group: the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(sys.argv[-1]), exit_code=1)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not get into an answer
    first = read_message(requests)
    if first is None:
        return
    task = decode_task(first[1])
    decoder = None if first[0]["is_careful"] else OwnProcessDecoder(task.config.decode_limits())
    while (request := read_message(requests)) is not None:
        try:
            result = write_unit(decode_unit(request[1]), task, decoder)
            message = pack_message({}, encode_unit_result(result))
        except ShardmillError as error:
            parts = [error.what, error.expected, error.fix]
            message = pack_message({"error": type(error).__name__, "parts": parts, "detail": error.detail}, b"")
        answers.writelines(message)
        answers.flush()
