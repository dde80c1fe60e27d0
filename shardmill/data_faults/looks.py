"""Reads what each row of a version looks like from its row segments, for finding faults of the data."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from shardmill.data_faults.row_looks import LOOKED_AT, RowLooks, looks_of_rows
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import LOOK_COLUMNS, read_rows
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.loader.samples import iterate_samples


def read_looks(
    dataset: Dataset, on_progress: Callable[[int, int], None] = lambda num_read, num_images: None
) -> RowLooks:
    """Read all row segments, about 100 bytes a row in memory; images are only decoded if an older shardmill wrote them.

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
    shards = map(index.shard, range(index.num_shards))
    rows = pa.concat_tables([read_rows(dataset.store, shard, schema, LOOKED_AT) for shard in shards])
    if rows.column("laplacian_square_sum").null_count == 0:
        return rows
    lumas = (luma(sample.image_HWC) for sample in iterate_samples(dataset, split))
    looks = [(laplacian_square_sum(luma_HW), difference_hash(luma_HW)) for luma_HW in lumas]
    for name, values in zip(LOOK_COLUMNS, zip(*looks, strict=True), strict=True):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(values, LOOK_COLUMNS[name]))
    return rows
