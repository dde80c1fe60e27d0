"""Readers: chunks of a committed dataset to batches, in the order that the epoch plan says."""

from __future__ import annotations

from shardmill.reader.batches import BatchReader, ReaderOptions, read_batches

__all__ = ["BatchReader", "ReaderOptions", "read_batches"]
