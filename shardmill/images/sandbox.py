"""Runs `process_image` under limits of time and memory: no image can hang, crash or starve its task.

    with DecodeSandbox() as sandbox:
        outcome = sandbox.process(SourceImage(key="cat.jpg", size_bytes=len(data)), data, NormalizeOptions())

`DecodeSandbox` does so in a child process, which is kept warm from image to image. An image that ends it, or runs out
of time or memory, is tried once more alone in a fresh one: what a neighbour left behind is then not its fault. After
that it is rejected. `OwnProcessDecoder` does so in this process: faster, for one that may be lost. What breaks its
limit of time, or crashes a decoder, ends the process; whoever started it repeats the work with a `DecodeSandbox`, which
finds out which image it was. What runs out of memory goes to a sandbox at once.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import shardmill
from shardmill.child_process import ChildDied, begin_child, calling, own_pipes, pack_message, read_message, start_child
from shardmill.errors import StorageError, UsageError
from shardmill.images.decoder_id import INSTALLED_DECODERS
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.registry import load_object
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage

PROCESS_IMAGE = "shardmill.images.process:process_image"

_START_SECONDS = 120.0

# A child that neither works nor answers is given this many times its limit: a loaded machine may not let it run.
CLOCK_PER_CPU_SECOND = 6

_PIPE_BYTES = 1 << 20


_PAGE_BYTES = resource.getpagesize()

# To set the limits and lift them takes 10 us, as long as a third of a small image's decoding.
_MOST_IMAGES, _MOST_BYTES = 16, 1 << 18

# Images that share limits until they have used so much of the time.
_MOST_OF_TIME = 1 / 16


_SAMPLE_FIELDS = tuple(field.name for field in dataclasses.fields(ImageSample) if field.name != "image")

_Image = tuple[SourceImage, bytes]


Process = Callable[[SourceImage, bytes, NormalizeOptions], ImageSample | Rejection]


@dataclass(frozen=True, slots=True)
class PendingImage:
    """An image that the child is at work on."""

    source: SourceImage
    data: bytes
    options: NormalizeOptions


class DecodeSandbox:
    """One child process at most; not for several threads at once. `entry` is what the child calls.

    `config_section` is the config section whose keys set the limits, for a rejection to name; empty if none does.
    `clock` tells how long a child has been waited for, in seconds.
    """

    def __init__(
        self,
        limits: DecodeLimits | None = None,
        entry: str = PROCESS_IMAGE,
        config_section: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits or DecodeLimits()
        self._config_section = config_section
        self._entry = entry
        self._clock = clock
        self._child: _Child | None = None
        self._pending: PendingImage | None = None

    def __enter__(self) -> DecodeSandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the child; the next image starts another."""
        if self._child is not None:
            self._child.end()
        self._child = self._pending = None

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image with what `process` gives; the next one is taken, and so read, while the child is at work."""
        pending: PendingImage | None = None
        for source, data in images:
            if pending is not None:
                yield pending.source, self.finish(pending)
            pending = self.start(source, data, options)
        if pending is not None:
            yield pending.source, self.finish(pending)

    def process(self, source: SourceImage, data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
        """The outcome of `process_image`, or a rejection: `decoder_crash`, `decoder_timeout` or `decoder_memory`."""
        return self.finish(self.start(source, data, options))

    def start(self, source: SourceImage, data: bytes, options: NormalizeOptions) -> PendingImage:
        """Send an image to the child, so that the caller can read the next one; `finish` it before the next `start`."""
        # The caller failed before it took the last answer, which must not be taken for this image's.
        if self._pending is not None:
            self.close()
        if self._child is None:
            self._child = _Child(self._limits, self._entry, self._clock)
        self._child.send(source, data, options)
        self._pending = PendingImage(source, data, options)
        return self._pending

    def finish(self, pending: PendingImage) -> ImageSample | Rejection:
        """The outcome of the image that was started last."""
        try:
            return self._receive(pending)
        except _Failed:
            self.close()
        # Once more, alone in a fresh process.
        again = self.start(pending.source, pending.data, pending.options)
        try:
            return self._receive(again)
        except _Failed as failed:
            self.close()
            named = f"; {self._config_section}.{failed.limit_key} is the limit"
            detail = failed.detail + (named if self._config_section and failed.limit_key else "")
            source_sha256 = hashlib.sha256(pending.data).hexdigest()
            return pending.source.rejected(failed.reason, detail, "decode", source_sha256)

    def _receive(self, pending: PendingImage) -> ImageSample | Rejection:
        if self._child is None or pending is not self._pending:
            raise ValueError("this image is not the last one that was started")
        header, body = self._child.receive()
        self._pending = None
        if "memory_error" in header:
            detail = f"needs more than {self._limits.decode_memory_bytes} bytes"
            raise _Failed(RejectReason.DECODER_MEMORY, detail, "decode_memory_bytes")
        return unpack_outcome(pending.source, header, body)


class OwnProcessDecoder:
    """A `DecodeSandbox` that starts a child only when an image needs one. For the main thread."""

    def __init__(self, limits: DecodeLimits, entry: str = PROCESS_IMAGE) -> None:
        self._limits, self._entry = limits, entry
        self._process: Process = load_object(entry)
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115  as long as this process

    def decode(
        self, images: Iterable[_Image], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image with what `entry` gives; beyond limits of time this process ends by SIGPROF or SIGALRM."""
        for batch in _batches(images):
            outcomes: list[ImageSample | Rejection] = []
            while len(outcomes) < len(batch):
                try:
                    self._decode_some(batch[len(outcomes) :], options, outcomes)
                except MemoryError:
                    source, data = batch[len(outcomes)]
                    with DecodeSandbox(self._limits, self._entry, config_section="etl") as sandbox:
                        outcomes.append(sandbox.process(source, data, options))
            for (source, _), outcome in zip(batch, outcomes, strict=True):
                yield source, outcome

    def _decode_some(
        self, images: Sequence[_Image], options: NormalizeOptions, outcomes: list[ImageSample | Rejection]
    ) -> None:
        """Adds the outcomes of the first images, at least of one: each must have nearly all of the time for itself."""
        self._limit()
        end = time.monotonic() + _MOST_OF_TIME * self._limits.decode_timeout_seconds
        try:
            for source, data in images:
                outcomes.append(self._process(source, data, options))
                if time.monotonic() > end:
                    return
        finally:
            self._lift()

    def _limit(self) -> None:
        _, hard = self._address_space
        mapped_bytes = int(os.pread(self._statm.fileno(), 100, 0).split(maxsplit=1)[0]) * _PAGE_BYTES
        soft = mapped_bytes + self._limits.decode_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        # Their default action ends the process, also inside a C library that never comes back to Python.
        signal.setitimer(signal.ITIMER_PROF, self._limits.decode_timeout_seconds)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_PER_CPU_SECOND * self._limits.decode_timeout_seconds)

    def _lift(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)


def _batches(images: Iterable[_Image]) -> Iterator[list[_Image]]:
    """Runs of small images; one that is not small closes its run."""
    batch: list[_Image] = []
    num_bytes = 0
    for image in images:
        batch.append(image)
        num_bytes += len(image[1])
        if len(batch) == _MOST_IMAGES or num_bytes >= _MOST_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


class _Failed(Exception):
    """The child gave no answer. `limit_key` is the field of `DecodeLimits` that it broke, empty if none."""

    def __init__(self, reason: RejectReason, detail: str, limit_key: str = "") -> None:
        self.reason = reason
        self.detail = detail
        self.limit_key = limit_key
        super().__init__(f"{reason}: {detail}")


class _Child:
    """A process that has imported everything and waits for images."""

    def __init__(self, limits: DecodeLimits, entry: str, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        root = str(Path(shardmill.__file__).parent.parent.absolute())
        main = calling("shardmill.images.sandbox:serve_parent", root)
        try:
            self._process = start_child([*main, entry, str(limits.decode_memory_bytes)], _environment())
        except OSError as error:
            raise StorageError(
                f"the decoding process does not start: {error}", "expected this interpreter", f"see {sys.executable}"
            ) from error
        for pipe in (self._process.requests, self._process.answers):
            try:
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # most images then pass in one write
            except OSError:
                pass  # the user's pipes are at the system's limit; smaller ones only take longer
        self._failed: _Failed | None = None
        self._cpu_clock = ~self._process.process_id << 3 | 2  # as clock_getcpuclockid(3) makes it
        self._cpu_start = 0.0
        self._options: NormalizeOptions | None = None
        self._clock_start = clock()
        self._expect_hello()

    def send(self, source: SourceImage, data: bytes, options: NormalizeOptions) -> None:
        facts = {name: getattr(source, name) for name in ("key", "size_bytes", "mtime_ns", "etag")}
        self._clock_start, self._cpu_start = self._clock(), self._cpu_seconds()
        header: dict[str, Any] = {"source": facts}
        if options != self._options:  # seldom: a task has one set of them
            header["options"], self._options = options.model_dump(), options
        try:
            self._process.send(header, data, self._wait)
        except _Failed as failed:
            self._failed = failed  # for `receive`: an outcome belongs to `finish`

    def receive(self) -> tuple[dict[str, Any], bytes]:
        if self._failed is not None:
            raise self._failed
        # The parent may have read the next source since `send`, and the child cannot write more than the pipe holds.
        self._clock_start = self._clock()
        try:
            return self._process.receive(self._wait)
        except ChildDied as died:
            raise _Failed(*_how_it_ended(died.status)) from None

    def end(self) -> None:
        self._process.end()

    def _wait(self, pipe: select.poll) -> None:
        """Wait until the pipe is ready. Raises `_Failed` when the image's time is over."""
        limit = self._limits.decode_timeout_seconds
        while True:
            cpu_left = limit - (self._cpu_seconds() - self._cpu_start)
            clock_left = CLOCK_PER_CPU_SECOND * limit - (self._clock() - self._clock_start)
            if pipe.poll(1000 * max(0.001, min(cpu_left, clock_left))):
                return
            if cpu_left <= 0 or clock_left <= 0:
                detail = f"takes more than {limit:g} s"
                raise _Failed(RejectReason.DECODER_TIMEOUT, detail, "decode_timeout_seconds")

    def _cpu_seconds(self) -> float:
        try:
            return time.clock_gettime(self._cpu_clock)
        except OSError:  # it ended; reading the pipe will show how
            return self._cpu_start

    def _expect_hello(self) -> None:
        """Its imports take a moment; a failed import is not the fault of an image."""
        decoders = ""
        try:
            decoders = self._process.receive(_wait_for_start)[0]["decoders"]
        except (_Failed, ChildDied):
            pass  # what it printed on stderr is there to be read
        if not decoders:
            self.end()
            raise StorageError(
                "the decoding process does not start",
                f"expected an answer within {_START_SECONDS:g} s",
                f"make sure that {sys.executable} can import this shardmill and its packages, then run it again",
            )
        if decoders != INSTALLED_DECODERS:
            self.end()
            raise UsageError(
                f"the decoding process decodes with {decoders!r}",
                f"expected {INSTALLED_DECODERS!r}, as here",
                f"make sure that {sys.executable} can import this shardmill and its packages",
            )


def _wait_for_start(pipe: select.poll) -> None:
    if not pipe.poll(1000 * _START_SECONDS):
        raise _Failed(RejectReason.DECODER_TIMEOUT, "does not start")


def _how_it_ended(status: int | None) -> tuple[RejectReason, str]:
    if status is None:
        return RejectReason.DECODER_CRASH, "closes the decoding process's pipe"
    if status == -signal.SIGKILL:  # not by us, and it ignores all other signals that ask
        return RejectReason.DECODER_MEMORY, "killed from outside, as the kernel does when memory runs out"
    if status < 0:
        return RejectReason.DECODER_CRASH, f"ends the decoding process by {signal.Signals(-status).name}"
    return RejectReason.DECODER_CRASH, f"ends the decoding process with status {status}"


def _environment() -> dict[str, str]:
    kept = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return {
        **os.environ,
        # A relative or empty entry is the working directory.
        "PYTHONPATH": os.pathsep.join(path for path in kept if os.path.isabs(path)),
        # Its threads would take memory, and nothing here uses them.
        "OPENBLAS_NUM_THREADS": "1",
    }


def serve_parent() -> None:
    """`argv`: ..., module:function, bytes of memory an image may take, the parent's process id."""
    begin_child()
    entry, memory_bytes = sys.argv[-3], int(sys.argv[-2])
    in_pipe, out_pipe = own_pipes()
    requests, answers = os.fdopen(in_pipe, "rb"), os.fdopen(out_pipe, "wb")
    process: Process = load_object(entry)
    answers.writelines(pack_message({"decoders": INSTALLED_DECODERS}, b""))
    answers.flush()
    # libtiff complains on stderr about every damaged file; failures to start were still shown.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    limited, unlimited = _memory_limits(memory_bytes)
    options = NormalizeOptions()
    while (request := read_message(requests)) is not None:
        header, data = request
        if "options" in header:
            options = NormalizeOptions.model_validate(header["options"])
        # The messages are not the image's: without memory for them, nothing could be said about it.
        resource.setrlimit(resource.RLIMIT_AS, limited)
        try:
            outcome = process(SourceImage(**header["source"]), data, options)
        except MemoryError:
            outcome = None
        finally:
            resource.setrlimit(resource.RLIMIT_AS, unlimited)
        answers.writelines(pack_outcome(outcome))
        answers.flush()


def _memory_limits(num_bytes: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Inside and outside of an image: on top of what the imports have mapped, libraries and thread stacks, and none."""
    with open("/proc/self/statm") as statm:
        mapped_bytes = int(statm.read().split()[0]) * _PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = mapped_bytes + num_bytes
    return (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard), (before, hard)


def pack_outcome(outcome: ImageSample | Rejection | None) -> tuple[bytes, bytes]:
    """The child's answer; None for an image for which memory ran out."""
    if outcome is None:
        return pack_message({"memory_error": True}, b"")
    if isinstance(outcome, Rejection):
        facts = {"reason": outcome.reason, "detail": outcome.detail, "source_sha256": outcome.source_sha256}
        return pack_message(facts, b"")
    return pack_message({name: getattr(outcome, name) for name in _SAMPLE_FIELDS}, outcome.image)


def unpack_outcome(source: SourceImage, header: dict[str, Any], body: bytes) -> ImageSample | Rejection:
    """Unpack the outcome of `pack_outcome`. Facts that the parent knows about the source are not taken from
    the child.
    """
    if "reason" in header:
        return source.rejected(RejectReason(header["reason"]), header["detail"], "decode", header["source_sha256"])
    lists = ("channel_sums", "channel_square_sums", "notes")
    return ImageSample(image=body, **{**header, **{name: tuple(header[name]) for name in lists}})
