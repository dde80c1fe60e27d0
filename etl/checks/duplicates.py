"""Handles inputs with equal bytes after all units have run: counts them, fails the build, or keeps one of each."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.config import EtlConfig
from etl.listing.grouping import Group, GroupBy, Segment, SpilledRows, group_here, with_equals
from etl.sources.listed import SPLITS
from shardmill.dataset.build import UnitResult
from shardmill.dataset.duplicates import DuplicateCounts, count_duplicates
from shardmill.dataset.index import in_all_formats
from shardmill.dataset.ledger import RejectionLog
from shardmill.dataset.row_segments import MAX_KEPT_ROWS, ROWS_SCHEMA, RowReader, rows_file
from shardmill.errors import RejectLimitExceeded
from shardmill.ids import key_bytes
from shardmill.jobs.process import scratch_folder
from shardmill.storage import Store
from shardmill.values import Rejection, RejectReason, ShardInfo
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.units.copy_rows import RowCopier

_NUM_EXAMPLES = 3
# The copies of so many shards are in memory at once, while these shards are copied without them.
_SHARDS_PER_PART = 64

_LABELS = pa.schema([("source_sha256", pa.binary()), ("label", pa.int64()), ("split", pa.int8())])
_COUNTS = pa.schema([(name, pa.int64()) for name in ("duplicates", "conflicting", "leaked")])
_PLACES = pa.schema(
    [("source_sha256", pa.binary()), ("source", pa.string()), ("shard", pa.int64()), ("row", pa.int64())]
)
# A copy is a row whose bytes an input with a smaller key has, the original. `row` is its place in its shard.
_COPIES = pa.schema([("shard", pa.int64()), ("row", pa.int64()), ("source", pa.string()), ("original", pa.string())])

_NO_DUPLICATES = DuplicateCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The rows that remain under `etl.duplicates`."""

    results: Sequence[UnitResult]
    counts: DuplicateCounts


def resolve_duplicates(
    results: Sequence[UnitResult], rejections: RejectionLog, config: EtlConfig, copier: RowCopier,
    group: Group = group_here,
) -> Resolved:  # fmt: skip
    """Count equal inputs, or take out all but one of each: the others are added to `rejections`.

    Raises RejectLimitExceeded if the config allows none.
    """
    shards = [copies[0] for result in results for copies in in_all_formats(result.shards)]

    def group_kept(asked: GroupBy) -> Iterator[pa.Table]:
        """As an engine would, with rows that have been read before."""
        tables = copier.rows.read_each(shards, asked.schema.names)
        picked = [asked.pick(table, place) for place, table in enumerate(tables)]
        yield asked.fold(pa.concat_tables([asked.picked.empty_table(), *picked]))

    if sum(shard.num_rows for shard in shards) <= MAX_KEPT_ROWS:
        group = group_kept
    if config.duplicates == "report":
        return Resolved(results, count_copies(copier.store, shards, config, group))
    copies = find_copies(copier.store, shards, config, group)
    if config.duplicates == "error":
        _require_none(copies)
        return Resolved(results, _NO_DUPLICATES)
    return Resolved(list(_without(results, rejections, copies, config, copier)), _NO_DUPLICATES)


def count_copies(store: Store, shards: Iterable[ShardInfo], config: EtlConfig, group: Group) -> DuplicateCounts:
    """Count how often rows of `shards` repeat the bytes of another row, within its class and split or across them."""
    parts = pa.concat_tables([_COUNTS.empty_table(), *group(_group_by(store, shards, config, wants_places=False))])
    return DuplicateCounts(*(sum(parts.column(name).to_pylist()) for name in _COUNTS.names))


def find_copies(store: Store, shards: Iterable[ShardInfo], config: EtlConfig, group: Group) -> Iterator[pa.Table]:
    """Every row of `shards` that has to go, in tables of `_COPIES`; the same ones for any order of results."""
    return group(_group_by(store, shards, config, wants_places=True))


def _group_by(store: Store, shards: Iterable[ShardInfo], config: EtlConfig, *, wants_places: bool) -> GroupBy:
    segments, splits = [], bytearray()
    for shard in shards:
        segments.append(Segment(rows_file(shard), shard.num_rows))
        splits.append(SPLITS.index(shard.split))
    if wants_places:
        columns, work = ("source_sha256", "source"), (_pick_places, _PLACES, _fold_places, _COPIES)
    else:
        pick_labels = partial(_pick_labels, splits=bytes(splits))
        columns, work = ("source_sha256", "label"), (pick_labels, _LABELS, _fold_labels, _COUNTS)
    schema = pa.schema([ROWS_SCHEMA.field(name) for name in columns])
    return GroupBy(store.uri, tuple(segments), schema, *work, config.scratch_dir)


def _pick_labels(rows: pa.Table, place: int, splits: bytes) -> pa.Table:
    """`splits` holds the split of each shard, as its place in `SPLITS`."""
    splits_N = np.full(rows.num_rows, splits[place], np.int8)
    return pa.table([_digests(rows), rows.column("label"), splits_N], schema=_LABELS)


def _fold_labels(rows: pa.Table) -> pa.Table:
    found = count_duplicates(with_equals(rows))
    return pa.table([[found.duplicates], [found.conflicting], [found.leaked]], schema=_COUNTS)


def _pick_places(rows: pa.Table, place: int) -> pa.Table:
    shards_N = np.full(rows.num_rows, place)
    return pa.table([_digests(rows), rows.column("source"), shards_N, np.arange(rows.num_rows)], schema=_PLACES)


def _fold_places(rows: pa.Table) -> pa.Table:
    # In columns throughout: one digest may be that of very many rows, and all of them are in one part.
    rows = with_equals(rows).sort_by([("source_sha256", "ascending"), ("source", "ascending")])
    digests = rows.column("source_sha256")
    is_first_N = np.ones(rows.num_rows, bool)
    is_first_N[1:] = pc.not_equal(digests[1:], digests[:-1]).to_numpy()
    firsts_N = np.flatnonzero(is_first_N)[np.cumsum(is_first_N) - 1]
    originals = rows.column("source").take(pa.array(firsts_N, pa.int64()))
    return rows.append_column("original", originals).filter(pa.array(~is_first_N)).select(_COPIES.names)


def _digests(rows: pa.Table) -> pa.Array:
    """The source digests as bytes, which are half as long as their hex digits."""
    joined = bytes.fromhex("".join(rows.column("source_sha256").to_pylist()))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), rows.num_rows, [None, pa.py_buffer(joined)]).cast(
        pa.binary()
    )


def _require_none(copies: Iterable[pa.Table]) -> None:
    num_copies, examples = 0, []
    for found in copies:
        num_copies += found.num_rows
        smallest = found.sort_by("source").slice(0, _NUM_EXAMPLES).to_pylist()
        examples = heapq.nsmallest(_NUM_EXAMPLES, [*examples, *smallest], key=lambda each: key_bytes(each["source"]))
    if num_copies:
        named = ", ".join(f"{printable(each['source'])} = {printable(each['original'])}" for each in examples)
        raise RejectLimitExceeded(
            f"{num_copies} inputs have the same bytes as another, such as {named}",
            'etl.duplicates = "error" allows no duplicates; nothing was published',
            'remove them, or set etl.duplicates = "drop" to keep the one with the smallest key',
        )


def _without(
    results: Sequence[UnitResult], rejections: RejectionLog, copies: Iterable[pa.Table], config: EtlConfig,
    copier: RowCopier,
) -> Iterator[UnitResult]:  # fmt: skip
    """The results without the copies, which are added to `rejections`; those of a few shards are in memory at a time.

    A result that loses rows becomes a part for each of its shards.
    """
    with scratch_folder(config.scratch_dir) as scratch:
        spilled = SpilledRows(scratch, _COPIES)
        for found in copies:
            spilled.add(found, found.column("shard").to_numpy() // _SHARDS_PER_PART)
        of_shard, places = _CopiesByShard(spilled), itertools.count()
        for result in results:
            is_kept: dict[str, np.ndarray] = {}
            for shard, *_ in in_all_formats(result.shards):
                gone = of_shard.rows_of(next(places))
                is_kept[shard.path] = np.ones(shard.num_rows, bool)
                is_kept[shard.path][[copy["row"] for copy in gone]] = False
                rejections.add(_rejections(copier.rows, shard, gone))
            yield from copier.only_kept(result, is_kept)


class _CopiesByShard:
    """The copies of one shard after the other."""

    def __init__(self, spilled: SpilledRows) -> None:
        self._spilled = spilled
        self._part, self._rows = -1, _COPIES.empty_table()

    def rows_of(self, shard: int) -> list[dict[str, Any]]:
        """Return the rows in row order."""
        part = shard // _SHARDS_PER_PART
        if part != self._part:
            self._part, self._rows = part, self._spilled.read(part)
        is_of_shard_N = self._rows.column("shard").to_numpy() == shard
        return self._rows.filter(pa.array(is_of_shard_N)).sort_by("row").to_pylist()


def _rejections(reader: RowReader, shard: ShardInfo, copies: Sequence[dict[str, Any]]) -> Iterator[Rejection]:
    if not copies:
        return
    rows = reader.read(shard, ROWS_SCHEMA.names)
    records = rows.take(pa.array([copy["row"] for copy in copies])).to_pylist()
    for record, copy in zip(records, copies, strict=True):
        yield Rejection(
            record["source"],
            RejectReason.DUPLICATE_CONTENT,
            f"the bytes of {printable(copy['original'])}",
            record["source_bytes"],
            record["source_mtime_ns"],
            record["source_etag"],
            source_sha256=record["source_sha256"],
            stage="read",
        )
