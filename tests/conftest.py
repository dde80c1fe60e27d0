"""Fixtures for all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

from tests.demo import demo
from tests.services.s3 import s3_bucket, s3_server

__all__ = ["demo", "s3_bucket", "s3_server"]

# A failing example prints the blob that reproduces it; no deadline, because these machines are noisy.
settings.register_profile("shardmill", deadline=None, print_blob=True)
settings.load_profile("shardmill")

# Whoever starts the tests in the background passes on that Ctrl-C is ignored; then the commands that tests interrupt
# would ignore it too. A terminal does not.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
