"""Shards of an older version, carried into a new one: named again, or copied without the rows that have changed.

Each becomes the result of a work unit that did not have to run, so that the commit adds up all units alike.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from shardmill.dataset.row_segments import ROWS_SCHEMA
from shardmill.dataset.segment import read_segment, rows_file
from shardmill.dataset.unit_result import UnitResult
from shardmill.ids import DIGEST_MODULUS
from shardmill.storage import Store

if TYPE_CHECKING:
    from etl.changes import Changes
    from etl.shard_rows import RowCopier


def carry(changes: Changes, copier: RowCopier) -> Iterator[UnitResult]:
    """One result for each shard of which a row is left, in layout order.

    Raises IntegrityError if a shard that must be copied, or a row segment, is not what the older version vouches for.
    """
    # Negative, because the ranges of cells count from 0: what is carried comes first in the layout.
    for index, shard in enumerate(changes.shards, start=-len(changes.shards)):
        result = copier.result_of(index, shard.copies, shard.is_kept_N, shard.restated)
        if result is not None:
            yield result


def changes_nothing(store: Store, changes: Changes, results: Sequence[UnitResult]) -> bool:
    """Whether the new rows of `results` are the very rows that were removed, as those of touched files are."""
    balance: Counter[str] = Counter()
    for shard in changes.shards:
        if not shard.is_whole:
            rows = read_segment(store, rows_file(shard.copies[0]), ROWS_SCHEMA, shard.copies[0].num_rows)
            removed = rows.filter(pa.array(~shard.is_kept_N)).column("row_sha256").to_pylist()
            balance[shard.copies[0].split] -= sum(int.from_bytes(digest, "big") for digest in removed)
    for part in (part for result in results for part in result.splits):
        balance[part.split] += int(part.row_digest_sum, 16)
    return not any(total % DIGEST_MODULUS for total in balance.values())
