"""How often the same source bytes were accepted under several names, and under several classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.index import rows_file
from shardmill.dataset.row_segments import ROWS_SCHEMA
from shardmill.dataset.segment import read_segment
from shardmill.dataset.unit_result import UnitResult, decode_prefixes
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


def count_duplicates_of_units(store: Store, results: Sequence[UnitResult], format_name: str) -> DuplicateCounts:
    """What `count_duplicates` gives for all rows that the units wrote; reads few of their row segments, or none.

    Exact, although results carry only the first bytes of each SHA-256: rows with equal digests have equal prefixes, so
    every duplicate is among the rows whose prefix occurs twice. The segments of those rows are read, and their whole
    digests are counted. A row of another segment has a prefix of its own: it is a duplicate of none.
    """
    repeating = repeating_shards(results, format_name)
    tables = [
        read_segment(store, rows_file(shard), ROWS_SCHEMA, shard.num_rows).select(_COLUMNS) for shard in repeating
    ]
    return count_duplicates(pa.concat_tables([ROWS_SCHEMA.empty_table().select(_COLUMNS), *tables]))


def repeating_shards(results: Sequence[UnitResult], format_name: str) -> list[ShardInfo]:
    """The shards of one format with a row whose prefix another row has: every duplicate is in one of them."""
    shards = [shard for result in results for shard in _shards_in_row_order(result, format_name)]
    prefixes_N = decode_prefixes(part.source_prefixes for result in results for part in result.splits)
    _, places_N, times = np.unique(prefixes_N, return_inverse=True, return_counts=True)
    is_repeated_N = times[places_N] > 1
    bounds = np.cumsum([0, *(shard.num_rows for shard in shards)])
    assert bounds[-1] == len(prefixes_N)
    return [shard for place, shard in enumerate(shards) if is_repeated_N[bounds[place] : bounds[place + 1]].any()]


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


def _shards_in_row_order(result: UnitResult, format_name: str) -> Iterator[ShardInfo]:
    """One format's shards, in the order of the rows that the splits' sums count."""
    for part in result.splits:
        yield from (shard for shard in result.shards if (shard.split, shard.format) == (part.split, format_name))
