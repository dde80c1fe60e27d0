"""Reads what each row of a version looks like from its row segments, for finding faults of the data."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from shardmill.data_faults.row_looks import LOOKED_AT, RowLooks, looks_of_rows
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import LOOK_COLUMNS, read_rows
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.loader.samples import Samples


def read_looks(
    dataset: Dataset, on_progress: Callable[[int, int], None] = lambda num_read, num_images: None
) -> RowLooks:
    """Read all row segments, about 100 bytes a row in memory; only the shards of an older shardmill are decoded.

    `on_progress` gets the number of rows read and of all. Raises IntegrityError for an altered segment or shard.
    """
    manifest, parts = dataset.manifest, []
    num_read = 0
    for split in manifest.splits:
        parts.append(_looks_of_split(dataset, split))
        num_read += parts[-1].num_rows
        on_progress(num_read, manifest.counts.accepted)
    return looks_of_rows(manifest, parts)


def _looks_of_split(dataset: Dataset, split: str) -> pa.Table:
    index, schema = dataset.index(split), dataset.manifest.row_schema
    parts, first_row = [], 0
    for shard in map(index.shard, range(index.num_shards)):
        rows = read_rows(dataset.store, shard, schema, LOOKED_AT)
        rows_of_split = range(first_row, first_row := first_row + rows.num_rows)
        parts.append(rows if _has_looks(rows) else _decoded(rows, dataset, split, rows_of_split))
    return pa.concat_tables(parts)


def _has_looks(rows: pa.Table) -> bool:
    """Whether a shard was measured. One of plain images alone has no hash, and is decoded, which changes nothing."""
    is_measured = rows.column("laplacian_square_sum").null_count == 0
    return is_measured and all(rows.column(name).null_count < rows.num_rows for name in LOOK_COLUMNS)


def _decoded(rows: pa.Table, dataset: Dataset, split: str, rows_of_split: range) -> pa.Table:
    samples = Samples(dataset, split)
    lumas = (luma(samples[row].image_HWC) for row in rows_of_split)
    looks = [(laplacian_square_sum(luma_HW), difference_hash(luma_HW)) for luma_HW in lumas]
    for name, values in zip(LOOK_COLUMNS, zip(*looks, strict=True), strict=True):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, LOOK_COLUMNS[name]))
    return rows
