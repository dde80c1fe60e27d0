"""Carries shards of an older version into a new one: referenced again, or copied without the rows that changed.

Each becomes the result of a work unit that did not have to run, so that the commit adds up all units alike.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from etl.units.units import CopyUnit, UnitTask
from shardmill.dataset.build import SplitSums, UnitResult
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.statistics import ImageSizes
from shardmill.ids import DIGEST_MODULUS, add_digests, format_digest, key_hash

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes, ShardRows
    from etl.units.shard_rows import RowCopier
    from shardmill.dataset.manifest import Manifest
    from shardmill.dataset.row_segments import RowReader
    from shardmill.dataset.shard import Copies


# With fewer shards than that in a split, a run that adds rows copies none.
_MIN_MERGED = 6

Copy = Callable[[Sequence[CopyUnit], UnitTask], Iterator[UnitResult]]
"""Runs `etl.units.copy_unit.copy_rows` over units, in any order."""


def carry(parent: Manifest, changes: Changes, copier: RowCopier, task: UnitTask, copy: Copy) -> Iterator[UnitResult]:
    """One result for each shard of which a row is left, or for all of them. `copy` makes those that need new files.

    Raises IntegrityError if a shard that must be copied, or a row segment, does not match the older version's record.
    """
    if _stays_whole(parent, changes, task):
        yield _result_of_version(parent, changes, copier)
        return
    units: list[CopyUnit] = []
    for index, shard in enumerate(changes.shards, start=-len(changes.shards)):
        if shard.is_whole and shard.restated is None:
            result = copier.result_of(index, shard.copies, shard.is_kept_N)
            if result is not None:
                yield result
        elif shard.is_kept_N.any():
            units.append(_copy_unit(index, shard, task))
    if units:
        yield from copy(units, task)


def _stays_whole(parent: Manifest, changes: Changes, task: UnitTask) -> bool:
    """Whether all rows of `parent` stay as they are, so that its manifest has added them up already."""
    is_untouched = all(shard.is_whole and shard.restated is None for shard in changes.shards)
    num_rows = sum(len(shard.is_kept_N) for shard in changes.shards)  # without those of lost shards
    has_its_classes = parent.class_names == task.row_schema.class_names
    return is_untouched and num_rows == parent.counts.accepted and has_its_classes


def _result_of_version(parent: Manifest, changes: Changes, copier: RowCopier) -> UnitResult:
    """Return the result of one unit that would have written all of `parent`, without adding up a row."""
    refused = (key_hash(each.key) for each in read_rejections(copier.store, parent))
    return UnitResult(
        unit_index=-len(changes.shards),
        fingerprint="",
        shards=tuple(copy for copies in _with_merged(changes, copier) for copy in copies),
        splits=tuple(_split_sums(parent, name) for name in parent.splits),
        rejections=(),
        accepted_key_sum=format_digest(add_digests(int(parent.source.key_sum, 16), -sum(refused))),
        note_counts=tuple(parent.counts.by_note.items()),
    )


def _with_merged(changes: Changes, copier: RowCopier) -> Iterator[Copies]:
    """All shards, the small ones at the end of each split merged: their number grows with the logarithm of the runs
    that added them. Rows stay in their order.
    """
    of_splits: dict[str, list[Copies]] = {}
    for shard in changes.shards:
        of_splits.setdefault(shard.copies[0].split, []).append(shard.copies)
    for shards in of_splits.values():
        first = first_to_merge([copies[0].size_bytes for copies in shards], copier.max_merged_bytes)
        yield from shards[:first]
        if first < len(shards):
            yield from copier.merge(shards[first:])


def first_to_merge(sizes: Sequence[int], max_bytes: int) -> int:
    """The place from which on the last shards of a split are merged, given their sizes in bytes; behind all for none.

    A shard is merged once those behind it are as large: so a row is copied each time that what it is part of doubles.
    """
    first, behind = len(sizes), 0
    for place in reversed(range(len(sizes))):
        if behind + sizes[place] > max_bytes:
            break
        if len(sizes) - place >= _MIN_MERGED and sizes[place] <= behind:
            first = place
        behind += sizes[place]
    return first


def _split_sums(parent: Manifest, name: str) -> SplitSums:
    """A manifest has channel sums of the train split alone, and sizes of all splits: here they are the first one's."""
    split, sums = parent.splits[name], parent.channel_sums
    nothing = (0,) * parent.normalize.num_channels
    is_first, is_train = name == next(iter(parent.splits)), name == "train"
    return SplitSums(
        split=name,
        num_rows=split.num_rows,
        image_bytes=split.image_bytes,
        class_counts=split.class_counts,
        row_digest_sum=split.row_digest_sum,
        num_pixels=sums.num_pixels if is_train else 0,
        channel_sums=sums.sums if is_train else nothing,
        channel_square_sums=sums.square_sums if is_train else nothing,
        sizes=parent.sizes if is_first else ImageSizes(),
    )


def _copy_unit(index: int, shard: ShardRows, task: UnitTask) -> CopyUnit:
    kept = base64.b64encode(np.packbits(shard.is_kept_N).tobytes()).decode()
    restated = "" if shard.restated is None else base64.b64encode(_arrow_stream(shard.restated)).decode()
    sizes = (task.config.chunk_bytes, task.config.shard_max_bytes)
    deciding = repr((index, shard.copies, kept, restated, task.row_schema, sizes))
    fingerprint = hashlib.sha256(deciding.encode()).hexdigest()
    return CopyUnit(index, fingerprint, shard.copies, kept, restated, int(shard.is_kept_N.sum()))


def _arrow_stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def changes_nothing(reader: RowReader, changes: Changes, results: Sequence[UnitResult]) -> bool:
    """Whether the new rows of `results` are the very rows that were removed, as those of touched files are."""
    balance: Counter[str] = Counter()
    for shard in changes.shards:
        if not shard.is_whole:
            rows = reader.read(shard.copies[0], ("row_sha256",))
            removed = rows.filter(pa.array(~shard.is_kept_N)).column("row_sha256").to_pylist()
            balance[shard.copies[0].split] -= sum(int.from_bytes(digest, "big") for digest in removed)
    for part in (part for result in results for part in result.splits):
        balance[part.split] += int(part.row_digest_sum, 16)
    return not any(total % DIGEST_MODULUS for total in balance.values())
