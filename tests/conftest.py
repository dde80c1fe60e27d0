"""Fixtures for all tests."""

from __future__ import annotations

from hypothesis import settings

from tests.demo import demo
from tests.services.s3 import s3_bucket, s3_server

__all__ = ["demo", "s3_bucket", "s3_server"]

# A failing example prints the blob that reproduces it; no deadline, because these machines are noisy.
settings.register_profile("shardmill", deadline=None, print_blob=True)
settings.load_profile("shardmill")
