"""Runs `process_image` under the sandbox's limits in this process: faster, for a process that may be lost.

An image that breaks a limit of time, or crashes a decoder, ends the process; whoever started it repeats the work with
a `DecodeSandbox`, which finds out which image it was. One that runs out of memory goes to a sandbox at once.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardmill.images.sandbox import CLOCK_PER_CPU_SECOND, PROCESS_IMAGE, DecodeSandbox
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.registry import load_object
from shardmill.values import ImageSample, Rejection, SourceImage

_PAGE_BYTES = resource.getpagesize()
# To set the limits and lift them takes 10 us, as long as a third of a small image's decoding.
_MOST_IMAGES, _MOST_BYTES = 16, 1 << 18
# Images that share limits until they have used so much of the time.
_MOST_OF_TIME = 1 / 16

_Image = tuple[SourceImage, bytes]
Process = Callable[[SourceImage, bytes, NormalizeOptions], ImageSample | Rejection]


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
        soft = self._mapped_bytes() + self._limits.decode_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
        # Their default action ends the process, also inside a C library that never comes back to Python.
        signal.setitimer(signal.ITIMER_PROF, self._limits.decode_timeout_seconds)
        signal.setitimer(signal.ITIMER_REAL, CLOCK_PER_CPU_SECOND * self._limits.decode_timeout_seconds)

    def _lift(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self._address_space)

    def _mapped_bytes(self) -> int:
        return int(os.pread(self._statm.fileno(), 100, 0).split(maxsplit=1)[0]) * _PAGE_BYTES


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
