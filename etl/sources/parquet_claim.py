"""Tells Parquet files that hold images from tables that name them: both have the same suffix."""

from __future__ import annotations

import pyarrow as pa

from etl.sources.containers import Containers
from etl.sources.names import PARQUET_SUFFIXES
from etl.sources.parquet_columns import bytes_leaf, holds_lists_of_bytes, read_footer
from etl.sources.stored_file import open_file
from shardmill.errors import ShardmillError


def holds_images(uri: str) -> bool:
    """Whether a file (of a pattern, the first one) has a column of bytes, which may be images; a table has none."""
    files = Containers(uri, PARQUET_SUFFIXES)
    try:
        with open_file(files.store, files.find().containers[0]) as stream:
            schema = read_footer(stream).schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ShardmillError):
        return False
    return any(bytes_leaf(field) is not None or holds_lists_of_bytes(field) for field in schema)
