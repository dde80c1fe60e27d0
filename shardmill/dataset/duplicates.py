"""How often the same source bytes were accepted under several names, and under several classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.row_segments import ROWS_SCHEMA
from shardmill.dataset.segment import read_segment, rows_file
from shardmill.storage import Store
from shardmill.values import ShardInfo

_COLUMNS = ["source_sha256", "label"]
# All row segments are read for the names in a warning: at most about 20 MB.
_MAX_ROWS_SEARCHED = 200_000
_NUM_NAMED = 4


@dataclass(frozen=True, slots=True)
class DuplicateCounts:
    """Accepted inputs whose bytes another one had already, and those whose bytes another one has in another class."""

    duplicates: int
    conflicting: int


def count_duplicates(rows: pa.Table) -> DuplicateCounts:
    """From the columns `source_sha256` and `label` of all rows."""
    groups = rows.group_by("source_sha256").aggregate([("label", "count_distinct"), ([], "count_all")])
    conflicting = groups.filter(pc.field("label_count_distinct") > 1).column("count_all")
    return DuplicateCounts(rows.num_rows - groups.num_rows, sum(conflicting.to_pylist()))


def first_conflict(store: Store, shards: Sequence[ShardInfo]) -> tuple[str, ...]:
    """A few sources in `shards` with equal bytes and several classes; none if there are too many rows to search."""
    if not 0 < sum(shard.num_rows for shard in shards) <= _MAX_ROWS_SEARCHED:
        return ()
    columns = ["source", *_COLUMNS]
    tables = [read_segment(store, rows_file(shard), ROWS_SCHEMA, shard.num_rows).select(columns) for shard in shards]
    groups = (
        pa.concat_tables(tables)
        .group_by("source_sha256")
        .aggregate([("label", "count_distinct"), ("source", "list")])
        .filter(pc.field("label_count_distinct") > 1)
    )
    return tuple(min(map(sorted, groups.column("source_list").to_pylist()), default=[])[:_NUM_NAMED])
