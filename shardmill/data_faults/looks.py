"""Reads what each row of a version looks like from its row segments, for finding faults of the data."""

from __future__ import annotations

import pyarrow as pa

from shardmill.data_faults.row_looks import LOOKED_AT, RowLooks, looks_of_rows
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import read_rows


def read_looks(dataset: Dataset) -> RowLooks:
    """Read all row segments, about 100 bytes a row in memory. Raises IntegrityError for an altered segment."""
    manifest = dataset.manifest

    def rows_of(split: str) -> pa.Table:
        index = dataset.index(split)
        shards = map(index.shard, range(index.num_shards))
        return pa.concat_tables([read_rows(dataset.store, each, manifest.row_schema, LOOKED_AT) for each in shards])

    return looks_of_rows(manifest, [rows_of(split) for split in manifest.splits])
