"""Counts how often the same source bytes were accepted under several names, several classes, and in several splits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.row_segments import ROWS_SCHEMA, read_segment, rows_file
from shardmill.storage import Store
from shardmill.values import ShardInfo

# All row segments are read for the names in a warning: at most about 20 MB.
_MAX_ROWS_SEARCHED = 200_000
_NUM_NAMED = 4
_NUM_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class DuplicateCounts:
    """Accepted inputs that share their bytes."""

    duplicates: int
    """Number of images whose bytes another image already had."""
    conflicting: int
    """Number of images whose bytes another image has in another class."""
    leaked: int
    """Number of images whose bytes another image has in another split."""


@dataclass(frozen=True, slots=True)
class DuplicateExamples:
    """The sources of one set of equal bytes each, a few of them; empty if there is none, or too many rows to search."""

    conflicting: tuple[str, ...] = ()
    """Examples in several classes."""
    leaked: tuple[tuple[str, str], ...] = ()
    """Examples in several splits: each source with its split."""


def count_duplicates(rows: pa.Table) -> DuplicateCounts:
    """Count from the columns `source_sha256`, `label` and `split` of all rows, or of all rows that may share bytes."""
    groups = rows.group_by("source_sha256").aggregate(
        [("label", "count_distinct"), ("split", "count_distinct"), ([], "count_all")]
    )
    conflicting, leaked = (
        sum(groups.filter(pc.field(f"{name}_count_distinct") > 1).column("count_all").to_pylist())
        for name in ("label", "split")
    )
    return DuplicateCounts(rows.num_rows - groups.num_rows, conflicting, leaked)


def find_examples(store: Store, shards: Sequence[ShardInfo]) -> DuplicateExamples:
    """The first sources with equal bytes in `shards`, which are of one format."""
    if not 0 < sum(shard.num_rows for shard in shards) <= _MAX_ROWS_SEARCHED:
        return DuplicateExamples()
    with ThreadPoolExecutor(_NUM_AT_ONCE, "shardmill-examples") as pool:
        rows = pa.concat_tables(pool.map(partial(_rows_with_split, store), shards))
    groups = rows.group_by("source_sha256").aggregate(
        [("label", "count_distinct"), ("split", "count_distinct"), ("source", "list"), ("split", "list")]
    )
    conflicting, leaked = (
        groups.filter(pc.field(f"{name}_count_distinct") > 1).select(["source_list", "split_list"]).to_pylist()
        for name in ("label", "split")
    )
    return DuplicateExamples(
        tuple(min((sorted(each["source_list"]) for each in conflicting), default=[])[:_NUM_NAMED]),
        min((_first_of_each_split(each["source_list"], each["split_list"]) for each in leaked), default=()),
    )


def _rows_with_split(store: Store, shard: ShardInfo) -> pa.Table:
    rows = read_segment(store, rows_file(shard), ROWS_SCHEMA, shard.num_rows)
    return rows.select(["source", "source_sha256", "label"]).append_column(
        "split", pa.array([shard.split] * rows.num_rows, pa.string())
    )


def _first_of_each_split(sources: Sequence[str], splits: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """One source of each split with the split's name; the smallest, sorted."""
    firsts = {split: source for source, split in sorted(zip(sources, splits, strict=True), reverse=True)}
    return tuple(sorted((source, split) for split, source in firsts.items()))
