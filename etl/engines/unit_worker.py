"""The process of a `UnitRunner`: reads units from a pipe and returns results until the pipe is closed; and its fork
server.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import IO, Any

import pyarrow as pa

from etl.config import EtlConfig, SourceConfig
from etl.engines.unit_runner import END, KILLED
from etl.sources import SOURCES
from etl.units.copy_rows import copy_rows
from etl.units.units import CopyUnit, decode_task, decode_unit
from etl.units.write_unit import Decoder, Decoders, sandboxes_of_process, write_unit
from etl.user_code import own_error
from shardmill.child_process import begin_child, die_with_parent, own_pipes, pack_message, read_message
from shardmill.dataset.build import encode_unit_result
from shardmill.errors import ShardmillError
from shardmill.formats import SHARD_FORMATS
from shardmill.images.annotations import MAKE_MASK
from shardmill.images.sandbox import OwnProcessDecoder
from shardmill.jobs.json_log import start_json_log
from shardmill.jobs.process import log_to_stderr
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.stores.retries import begin_under_driver
from shardmill.values import ImageSample, Rejection, SourceImage

_POLL_SECONDS = 0.005


def main() -> None:
    """Work on the standard streams."""
    begin_child()
    _work(*own_pipes())


def serve() -> None:
    """Fork workers, and end them, as a `ForkServer` asks on the socket 0."""
    begin_child()
    os.dup2(2, 1)
    gc.disable()
    # The registry entries that most tasks use; each worker loads further ones when its task names them.
    _ = SOURCES[SourceConfig().kind], [SHARD_FORMATS[name] for name in EtlConfig().formats]
    open_store(os.getcwd())
    # Arrow imports pandas, if it is here, when it first makes a table: once is enough for all workers.
    pa.table({"": [0]})
    # What there is now is never freed: looking at it would only copy the pages that all workers share.
    gc.freeze()
    gc.enable()
    asked, forked = socket.socket(fileno=os.dup(0)), set[int]()
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, 32, 2)
        if not request:
            return
        if descriptors:
            answer = _fork(lambda: _work(*descriptors), asked)  # noqa: B023  runs before the next request
            for descriptor in descriptors:
                os.close(descriptor)
            forked.add(answer)
        else:
            process_id, seconds = request.removeprefix(END).split()
            # Of one that has been waited for, the id may be a stranger's by now.
            is_ours = int(process_id) in forked
            answer = _ended(int(process_id), float(seconds)) if is_ours else None
            forked.discard(int(process_id))
        asked.send(KILLED if answer is None else str(answer).encode())


def _fork(work: Callable[[], None], asked: socket.socket) -> int:
    """A child that does the work and ends; returns its process id."""
    server = os.getpid()
    process_id = os.fork()
    if process_id:
        return process_id
    status = 1
    try:
        die_with_parent(server, exit_code=1)
        asked.close()
        work()
        status = 0
    except BaseException:  # the child must not come back into the server's loop, whatever happens
        traceback.print_exc()
    finally:
        os._exit(status)


def _ended(process_id: int, seconds: float) -> int | None:
    """Its exit status if it ends within that time; else it is killed, and the answer None."""
    deadline = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(process_id, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    return None


def _work(requests: int, answers: int) -> None:
    """The first message is the task, each further one a work unit."""
    begin_under_driver()
    log_to_stderr(others=True)
    start_json_log()
    with os.fdopen(requests, "rb") as waiting, os.fdopen(answers, "wb") as pipe:
        first = read_message(waiting)
        if first is None:
            return
        task = decode_task(first[1])
        limits = task.config.decode_limits()
        decoders = Decoders(OwnProcessDecoder(limits), OwnProcessDecoder(limits, MAKE_MASK))
        if first[0]["is_careful"]:
            decoders = sandboxes_of_process(task.config)
            announcing = _AnnouncingDecoder(decoders.images, lambda key: _answer(pipe, {"begun": key}))
            decoders = replace(decoders, images=announcing)
        while (request := read_message(waiting)) is not None:
            try:
                unit = decode_unit(request[1])
                if isinstance(unit, CopyUnit):
                    result = copy_rows(unit, task)
                else:
                    result = write_unit(unit, task, decoders, lambda: _answer(pipe, {"is_decoded": True}))
                _answer(pipe, {}, encode_unit_result(result))
            except MemoryError:
                raise  # ends this process, as the kernel does when it is out of memory
            except Exception as error:
                # No image was the cause of an ordinary error: it raises again in the parent.
                unit_index = json.loads(request[1])["index"]
                own = error if isinstance(error, ShardmillError) else own_error(f"work unit {unit_index}", error)
                refusal = {
                    "error": type(own).__name__,
                    "parts": [own.what, own.expected, own.fix],
                    "detail": own.detail,
                }
                note = "" if own is error else "".join(traceback.format_exception(error))
                _answer(pipe, {**refusal, "note": note})


class _AnnouncingDecoder:
    """A decoder that says which image's outcome comes next: if the process ends, its parent can name it."""

    def __init__(self, decoder: Decoder, announce: Callable[[str], None]) -> None:
        self._decoder = decoder
        self._announce = announce

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Decode images with the interface of a decoder."""
        waiting: deque[str] = deque()

        def taken() -> Iterator[tuple[SourceImage, bytes]]:
            for source, data in images:
                waiting.append(source.key)
                if len(waiting) == 1:
                    self._announce(source.key)
                yield source, data

        for outcome in self._decoder.decode(taken(), options):
            waiting.popleft()
            if waiting:
                self._announce(waiting[0])
            yield outcome


def _answer(pipe: IO[bytes], header: dict[str, Any], body: bytes = b"") -> None:
    pipe.writelines(pack_message(header, body))
    pipe.flush()
