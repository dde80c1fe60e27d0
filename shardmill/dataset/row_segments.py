"""Row segments: a shard's rows without their pixels, as a table of its own beside the shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from shardmill.formats.rows import RowSchema, StoredRow


ROWS_SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("source", pa.string()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
        ("source_etag", pa.string()),
        ("source_sha256", pa.string()),
        ("label", pa.int64()),
        ("row_sha256", pa.binary(32)),
        ("notes", pa.string()),
        ("channel_sums", pa.list_(pa.int64())),
        ("channel_square_sums", pa.list_(pa.int64())),
    ]
)


def rows_schema(schema: RowSchema) -> pa.Schema:
    """The columns of the row segments of a dataset: sizes only if they differ, extra columns only if there are any."""
    sizes = [("height", pa.int32()), ("width", pa.int32())] if schema.one_shape_HWC is None else []
    extra = [("extra", pa.string())] if schema.has_values else []
    return pa.schema([*ROWS_SCHEMA, *(pa.field(*each) for each in (*sizes, *extra))])


def count_pixels(rows: pa.Table, schema: RowSchema) -> int:
    """Of all images of a row segment, or of several."""
    if schema.one_shape_HWC is not None:
        return rows.num_rows * schema.one_shape_HWC[0] * schema.one_shape_HWC[1]
    heights_N, widths_N = (rows.column(name).to_numpy().astype(np.int64) for name in ("height", "width"))
    return int(heights_N @ widths_N)


def rows_table(rows: Sequence[StoredRow], schema: RowSchema) -> pa.Table:
    """A shard's rows without their pixels."""
    sources = [row.source for row in rows]
    columns = {
        "sample_id": [source.sample_id for source in sources],
        "source": [source.key for source in sources],
        "source_bytes": [source.size_bytes for source in sources],
        "source_mtime_ns": [source.mtime_ns for source in sources],
        "source_etag": [source.etag for source in sources],
        "source_sha256": [row.sample.source_sha256 for row in rows],
        "label": [row.label_id for row in rows],
        "row_sha256": [row.digest for row in rows],
        "notes": [",".join(row.sample.notes) for row in rows],
        "channel_sums": [row.sample.channel_sums for row in rows],
        "channel_square_sums": [row.sample.channel_square_sums for row in rows],
        "height": [row.sample.height for row in rows],
        "width": [row.sample.width for row in rows],
        "extra": [source.extra for source in sources],
    }
    fields = rows_schema(schema)
    return pa.table([pa.array(columns[field.name], field.type) for field in fields], schema=fields)
