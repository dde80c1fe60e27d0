"""Shard formats: a new one is a module with a `ShardFormat` and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from shardmill.formats.rows import ShardFormat

SHARD_FORMATS: Registry[ShardFormat] = Registry(
    "etl.formats",
    {
        "parquet": Entry("shardmill.formats.parquet:PARQUET", "columns; a chunk is a row group"),
        "tfrecord": Entry("shardmill.formats.tfrecord:TFRECORD", "tf.Example records; a chunk is a run of them"),
    },
    point=ExtensionPoint("how a shard holds its rows", "shardmill.formats.rows:ShardFormat"),
)
