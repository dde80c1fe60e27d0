"""Measures how much of the latest version a source has lost: an empty mount must not become an empty version."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.listing.segments import find_sorted
from shardmill.dataset.index import in_all_formats, read_shards, stored_sizes
from shardmill.dataset.row_segments import ROWS_SCHEMA, read_segment, rows_file
from shardmill.errors import StorageError
from shardmill.ids import sample_id_of

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.listing.listing import Listing
    from etl.plan import BuildPlan
    from shardmill.dataset.manifest import Manifest
    from shardmill.storage import Store


_READ = pa.schema([ROWS_SCHEMA.field("sample_id")])


def check_vanished(plan: BuildPlan, changes: Changes | None) -> None:
    """Raise StorageError if the source lists too few of the images that the latest version has of it.

    `changes`: what was found to be gone or changed, None if nothing was compared. An append replaces nothing.
    """
    parent, limit = plan.parent, plan.task.config.max_vanished_fraction
    if parent is None or plan.is_append or not plan.build.source.continues(parent.source):
        return
    num_allowed = limit * parent.counts.accepted
    # The names are looked up only if they can tell: a row that is unchanged has not vanished. One of a lost shard may.
    num_unchanged = 0 if changes is None else changes.num_unchanged
    if num_allowed >= parent.counts.accepted - num_unchanged:
        return
    num_vanished = _num_vanished(plan.store, parent, plan.listing)
    if num_vanished > num_allowed:
        raise StorageError(
            f"{num_vanished:,} of the {parent.counts.accepted:,} images of version {parent.version} are not in "
            f"{plan.build.source.described} any more",
            f"etl.max_vanished_fraction allows {limit:g}; nothing was published",
            "mount or restore the source and run again; if they were removed on purpose, set the limit to 1",
        )


def _num_vanished(store: Store, parent: Manifest, listing: Listing) -> int:
    """Rows of which no input of the listing has the sample id; 9 bytes a row are in memory."""
    shards = read_shards(store, parent)
    sizes = stored_sizes(store, [rows_file(shard) for shard in shards])
    ids = [np.empty(0, np.int64)]
    for group in in_all_formats(shards):
        # Of lost row segments nothing can be said; the build makes their rows again.
        shard = next((each for each in group if each.rows_path in sizes), None)
        if shard is not None:
            rows = read_segment(store, rows_file(shard), _READ, shard.num_rows)
            ids.append(rows.column("sample_id").to_numpy())
    ids_N = np.sort(np.concatenate(ids))
    is_listed_N = np.zeros(len(ids_N), bool)

    def mark(listed_M: np.ndarray) -> None:
        places_M, found_M = find_sorted(ids_N, listed_M)
        is_listed_N[places_M[found_M]] = True

    mark(np.array([sample_id_of(each.key) for each in listing.rejections], np.int64))
    for segment in listing.segments:
        for batch in pq.ParquetFile(listing.folder / segment.path).iter_batches(columns=["sample_id"]):
            mark(batch.column("sample_id").to_numpy())
    return int((~is_listed_N).sum())
