"""The child process of the sandbox: it decodes one image after the other, until its pipe is closed.

The parent starts `main` (see `sandbox.py`) with the function to call as `module:function`; messages are those of
`shardmill.messages`.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
from collections.abc import Callable

from shardmill.child_process import begin_child, own_pipes
from shardmill.images.decode_messages import pack_outcome
from shardmill.images.decoder_id import INSTALLED_DECODERS
from shardmill.messages import pack_message, read_message
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage

Process = Callable[[SourceImage, bytes, NormalizeOptions], ImageSample | Rejection]


def main() -> None:
    """`argv`: ..., module:function, bytes of memory an image may take, the parent's process id."""
    begin_child()
    entry, memory_bytes = sys.argv[-3], int(sys.argv[-2])
    in_pipe, out_pipe = own_pipes()
    requests, answers = os.fdopen(in_pipe, "rb"), os.fdopen(out_pipe, "wb")
    module, _, function = entry.partition(":")
    process: Process = getattr(importlib.import_module(module), function)
    answers.writelines(pack_message({"decoders": INSTALLED_DECODERS}, b""))
    answers.flush()
    _silence_stderr()  # libtiff complains there about every damaged file; failures to start were still shown
    limited, unlimited = _memory_limits(memory_bytes)
    options = NormalizeOptions()
    while (request := read_message(requests)) is not None:
        header, data = request
        if "options" in header:
            options = NormalizeOptions.model_validate(header["options"])
        # The messages are not the image's: without memory for them, nothing could be said about it.
        resource.setrlimit(resource.RLIMIT_AS, limited)
        try:
            outcome = _outcome(process, SourceImage(**header["source"]), data, options)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        answers.writelines(pack_outcome(outcome))
        answers.flush()


def _outcome(
    process: Process, source: SourceImage, data: bytes, options: NormalizeOptions
) -> ImageSample | Rejection | None:
    """None if memory ran out."""
    try:
        return process(source, data, options)
    except MemoryError:
        return None


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
