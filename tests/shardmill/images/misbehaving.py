"""Replacements of `process_image` for the sandbox's tests: each function fails if the key says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.values import ImageSample, Rejection, SourceImage


def misbehave(source: SourceImage, data: bytes, options: NormalizeOptions) -> ImageSample | Rejection:
    match source.key:
        case "abort":
            os.abort()
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
        case "raise":
            raise RuntimeError("a bug")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(1000)
        case "close":
            os.closerange(3, 100)
            time.sleep(1000)
        case "allocate":
            np.ones(400_000_000, np.uint8)
        case "print":
            os.write(1, b"noise" * 100)
            sys.stdout.flush()
        case key if key.startswith("once:"):  # goes wrong in the first process that sees it
            seen = Path(key.removeprefix("once:"))
            if not seen.exists():
                seen.touch()
                os.abort()
    return process_image(source, data, options)
