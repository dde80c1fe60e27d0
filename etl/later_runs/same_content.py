"""Handles sources whose size or time changed but whose bytes, once a task has read them, equal those of their rows."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.listing.segments import find_sorted
from shardmill.dataset.build import UnitResult, decode_sample_ids

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes, ShardRows
    from etl.later_runs.older_rows import OlderRows
    from etl.listing.listing import Listing

_RESTATED = ("size_bytes", "mtime_ns", "etag")


def with_same_content(changes: Changes, work: Listing, results: Sequence[UnitResult]) -> Changes:
    """The changes without those that were none; `work` lists what the units of `results` read.

    Such rows stay, and are stated with their new sizes and times: the version that is made next remembers them, so that
    they are not read again. About 50 bytes for each of them are in memory.
    """
    ids_N = np.sort(decode_sample_ids(result.unchanged_ids for result in results))
    if changes.rows is None or not len(ids_N):
        return changes
    restated = _restated(changes.rows, work, ids_N)
    rows_N = restated.column("row").to_numpy()
    starts = np.cumsum([0, *(len(shard.is_kept_N) for shard in changes.shards)])
    cuts = np.searchsorted(rows_N, starts)
    shards = []
    for place, shard in enumerate(changes.shards):
        part = restated.slice(cuts[place], cuts[place + 1] - cuts[place])
        shards.append(_keep(shard, part, int(starts[place])) if part.num_rows else shard)
    return replace(
        changes,
        shards=tuple(shards),
        num_unchanged=changes.num_unchanged + len(rows_N),
        num_removed=changes.num_removed - len(rows_N),
    )


def _restated(rows: OlderRows, work: Listing, ids_N: np.ndarray) -> pa.Table:
    """The row of each unchanged image, ascending, and what is listed of it now. `ids_N` is ascending as well."""
    tables = []
    for segment in work.segments:
        for batch in pq.ParquetFile(work.folder / segment.path).iter_batches():
            _, is_unchanged_N = find_sorted(ids_N, batch.column("sample_id").to_numpy())
            images = pa.Table.from_batches([batch]).filter(pa.array(is_unchanged_N))
            rows_N, _ = rows.find_renewed(images)
            columns = [images.column(name) for name in _RESTATED]
            tables.append(pa.table([pa.array(rows_N), *columns], names=["row", *_RESTATED]))
    return pa.concat_tables(tables).sort_by("row")


def _keep(shard: ShardRows, restated: pa.Table, first_row: int) -> ShardRows:
    rows_N = restated.column("row").to_numpy() - first_row
    is_kept_N = shard.is_kept_N.copy()
    is_kept_N[rows_N] = True
    return replace(shard, is_kept_N=is_kept_N, restated=restated.set_column(0, "row", pa.array(rows_N)))
