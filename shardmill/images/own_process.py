"""`process_image` under the sandbox's limits in this very process: faster, for a process that may be lost.

An image that breaks a limit of time, or crashes a decoder, ends the process; whoever started it repeats the work with
a `DecodeSandbox`, which finds out which image it was. One that runs out of memory goes to a sandbox at once.
"""

from __future__ import annotations

import os
import resource
import signal

from shardmill.images.process import process_image
from shardmill.images.sandbox import CLOCK_PER_CPU_SECOND, DecodeSandbox, PendingImage
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage

_PAGE_BYTES = resource.getpagesize()


class OwnProcessDecoder:
    """What `DecodeSandbox` does, without a child as long as no image needs one. For the main thread."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._address_space = resource.getrlimit(resource.RLIMIT_AS)
        self._statm = open("/proc/self/statm", "rb", buffering=0)  # noqa: SIM115  as long as this process

    def start(self, source: SourceImage, data: bytes, options: NormalizeOptions) -> PendingImage:
        """The image for `finish`, which does all the work."""
        return PendingImage(source, data, options)

    def finish(self, pending: PendingImage) -> ImageSample | Rejection:
        """The outcome of `process_image`; beyond the limits of time this process ends by SIGPROF or SIGALRM."""
        try:
            self._limit()
            try:
                return process_image(pending.source, pending.data, pending.options)
            finally:
                self._lift()
        except MemoryError:
            with DecodeSandbox(self._limits, config_section="etl") as sandbox:
                return sandbox.process(pending.source, pending.data, pending.options)

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
