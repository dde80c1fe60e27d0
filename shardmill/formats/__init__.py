"""Shard formats: a new one is a module with a `ShardFormat` and an entry here."""

from __future__ import annotations

from shardmill.formats.parquet import PARQUET
from shardmill.formats.rows import ShardFormat
from shardmill.formats.tfrecord import TFRECORD

SHARD_FORMATS: dict[str, ShardFormat] = {"parquet": PARQUET, "tfrecord": TFRECORD}
