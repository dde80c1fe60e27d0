"""Names the images of a version that have equal bytes; the build has only counted them."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from shardmill.data_faults.near_duplicates import SimilarImage, SimilarImages
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import read_rows

_COLUMNS = ("source", "source_sha256", "label")


def find_equal_bytes(dataset: Dataset) -> list[SimilarImages]:
    """Groups of images with equal bytes, those that cross splits first, then those of several classes.

    Reads nothing if the build has counted none. About 150 bytes a row in memory.
    """
    manifest = dataset.manifest
    if not manifest.counts.duplicate_content:
        return []
    rows = pa.concat_tables(_rows_of_split(dataset, split) for split in manifest.splits)
    counts = rows.group_by("source_sha256").aggregate([([], "count_all")])
    repeated = counts.filter(pc.field("count_all") > 1).column("source_sha256")
    names = dict(enumerate(manifest.class_names))
    by_digest: dict[str, list[SimilarImage]] = {}
    for row in rows.filter(pc.is_in(rows.column("source_sha256"), repeated)).to_pylist():
        image = SimilarImage(row["source"], row["split"], names.get(row["label"]))
        by_digest.setdefault(row["source_sha256"], []).append(image)
    groups = [SimilarImages(tuple(sorted(each, key=lambda image: image.source))) for each in by_digest.values()]
    return sorted(groups, key=lambda each: (not each.crosses_splits, not each.has_conflict, each.images[0].source))


def _rows_of_split(dataset: Dataset, split: str) -> pa.Table:
    index = dataset.index(split)
    shards = map(index.shard, range(index.num_shards))
    rows = pa.concat_tables(read_rows(dataset.store, each, dataset.manifest.row_schema, _COLUMNS) for each in shards)
    return rows.append_column("split", pa.array([split] * rows.num_rows, pa.string()))
