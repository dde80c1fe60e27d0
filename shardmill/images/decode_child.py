"""The inner end of the sandbox: a process that decodes one image after the other, until its pipe is closed.

A message is two lengths, a JSON header and raw bytes; nothing is ever unpickled. The parent starts `main` (see
`sandbox.py`) with the function to call as `module:function`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from shardmill.images.decode import DECODER_ID
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage

LENGTHS = struct.Struct("<IQ")
SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(ImageSample) if field.name != "image")
_PR_SET_PDEATHSIG = 1

Process = Callable[[SourceImage, bytes, NormalizeOptions], ImageSample | Rejection]


def main() -> None:
    """`argv`: ..., module:function, bytes of memory an image may take, the parent's process id."""
    entry, memory_bytes, parent = sys.argv[-3], int(sys.argv[-2]), int(sys.argv[-1])
    _end_with_parent(parent)
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a C library prints must not get into an answer
    module, _, function = entry.partition(":")
    process: Process = getattr(importlib.import_module(module), function)
    answers.writelines(pack_message({"decoder_id": DECODER_ID}, b""))
    answers.flush()
    _silence_stderr()  # libtiff complains there about every damaged file; failures to start were still shown
    limited, unlimited = _memory_limits(memory_bytes)
    options = NormalizeOptions()
    while (request := _read_message(requests)) is not None:
        header, data = request
        if "options" in header:
            options = NormalizeOptions.model_validate(header["options"])
        # The messages are not the image's: without memory for them, nothing could be said about it.
        resource.setrlimit(resource.RLIMIT_AS, limited)
        try:
            outcome = _outcome(process, SourceImage(**header["source"]), data, options)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        answers.writelines(_pack_outcome(outcome))
        answers.flush()


def pack_message(header: dict[str, Any], body: bytes) -> tuple[bytes, bytes]:
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text, body


def unpack_outcome(source: SourceImage, header: dict[str, Any], body: bytes) -> ImageSample | Rejection:
    """What `_pack_outcome` packed. What the parent knows of the source is not taken from the child."""
    if "reason" in header:
        return Rejection(
            key=source.key,
            reason=RejectReason(header["reason"]),
            detail=header["detail"],
            size_bytes=source.size_bytes,
            mtime_ns=source.mtime_ns,
            etag=source.etag,
            source_sha256=header["source_sha256"],
        )
    lists = ("channel_sums", "channel_square_sums", "notes")
    return ImageSample(image=body, **{**header, **{name: tuple(header[name]) for name in lists}})


def _outcome(
    process: Process, source: SourceImage, data: bytes, options: NormalizeOptions
) -> ImageSample | Rejection | None:
    """None if memory ran out."""
    try:
        return process(source, data, options)
    except MemoryError:
        return None


def _pack_outcome(outcome: ImageSample | Rejection | None) -> tuple[bytes, bytes]:
    if outcome is None:
        return pack_message({"memory_error": True}, b"")
    if isinstance(outcome, Rejection):
        told = {"reason": outcome.reason, "detail": outcome.detail, "source_sha256": outcome.source_sha256}
        return pack_message(told, b"")
    return pack_message({name: getattr(outcome, name) for name in SAMPLE_FIELDS}, outcome.image)


def _read_message(requests: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next one, None if the parent closed its end."""
    lengths = requests.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    return json.loads(requests.read(header_bytes)), requests.read(body_bytes)


def _end_with_parent(parent: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM go to the whole group: the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A closed pipe is seen between two images only; the kernel's signal also ends one that hangs.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def _silence_stderr() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def _memory_limits(num_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Inside and outside of an image: on top of what the imports have mapped, libraries and thread stacks, and none."""
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = mapped_bytes + num_bytes
    return (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard), (before, hard)
