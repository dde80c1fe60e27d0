"""Inputs with equal bytes, once all units have run: they end the build, or one of them stays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from etl.config import EtlConfig
from shardmill.dataset.duplicates import repeating_shards
from shardmill.dataset.index import in_all_formats, rows_file
from shardmill.dataset.row_segments import ROWS_SCHEMA
from shardmill.dataset.segment import read_segment
from shardmill.dataset.unit_result import UnitResult
from shardmill.errors import RejectLimitExceeded
from shardmill.ids import add_digests, format_digest, key_bytes, key_hash
from shardmill.printable import printable
from shardmill.storage import Store
from shardmill.values import Rejection, RejectReason

if TYPE_CHECKING:
    from etl.shard_rows import RowCopier

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class _Copy:
    """A row whose bytes an input with a smaller key has."""

    path: str
    """Of the shard in the first format."""
    row: int
    original: str
    """Key of the input that stays."""
    record: dict[str, Any]


def resolve_duplicates(results: Sequence[UnitResult], config: EtlConfig, copier: RowCopier) -> list[UnitResult]:
    """The results without what `etl.duplicates` does not allow. Raises RejectLimitExceeded if it allows none."""
    copies = [] if config.duplicates == "report" else _copies(copier.store, results, config.formats[0])
    if not copies:
        return list(results)
    if config.duplicates == "error":
        examples = ", ".join(
            f"{printable(each.record['source'])} = {printable(each.original)}" for each in copies[:_NUM_EXAMPLES]
        )
        raise RejectLimitExceeded(
            f"{len(copies)} inputs have the same bytes as another, such as {examples}",
            'etl.duplicates = "error" allows none; nothing was published',
            'remove them, or set etl.duplicates = "drop" to keep the one with the smallest key',
        )
    by_shard: dict[str, list[_Copy]] = {}
    for copy in copies:
        by_shard.setdefault(copy.path, []).append(copy)
    return [part for result in results for part in _without(result, by_shard, copier)]


def _copies(store: Store, results: Sequence[UnitResult], format_name: str) -> list[_Copy]:
    """Every row that has to go; only shards with a repeated prefix are looked into."""
    rows: dict[str, list[tuple[str, int, dict[str, Any]]]] = {}
    for shard in repeating_shards(results, format_name):
        table = read_segment(store, rows_file(shard), ROWS_SCHEMA, shard.num_rows)
        columns = ["source", "source_sha256", "source_bytes", "source_mtime_ns", "source_etag"]
        for place, record in enumerate(table.select(columns).to_pylist()):
            rows.setdefault(record["source_sha256"], []).append((shard.path, place, record))
    found = []
    for same in rows.values():
        first, *others = sorted(same, key=lambda row: key_bytes(row[2]["source"]))
        found += [_Copy(path, place, first[2]["source"], record) for path, place, record in others]
    return sorted(found, key=lambda copy: key_bytes(copy.record["source"]))


def _without(result: UnitResult, by_shard: dict[str, list[_Copy]], copier: RowCopier) -> Iterator[UnitResult]:
    """The result without the copies: a part for each shard, and one for everything that was refused."""
    groups = in_all_formats(result.shards)
    gone = [copy for group in groups for copy in by_shard.get(group[0].path, ())]
    if not gone:
        yield result
        return
    is_kept = {group[0].path: np.ones(group[0].num_rows, bool) for group in groups}
    for copy in gone:
        is_kept[copy.path][copy.row] = False
    *kept, rest = copier.only_kept(result, is_kept)
    yield from kept
    refused = [_rejection(copy) for copy in gone]
    key_sum = add_digests(int(rest.rejected_key_sum, 16), *(key_hash(each.key) for each in refused))
    yield replace(rest, rejections=(*rest.rejections, *refused), rejected_key_sum=format_digest(key_sum))


def _rejection(copy: _Copy) -> Rejection:
    record = copy.record
    return Rejection(
        record["source"],
        RejectReason.DUPLICATE_CONTENT,
        f"the bytes of {printable(copy.original)}",
        record["source_bytes"],
        record["source_mtime_ns"],
        record["source_etag"],
        source_sha256=record["source_sha256"],
        stage="read",
    )
