"""Writes rows of a work unit to shards while later ones are decoded, so that memory does not grow with the unit."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from etl.units.units import UnitTask
from shardmill.dataset.build import SplitSums
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.statistics import ImageSizes, count_sizes
from shardmill.formats.rows import ChunkCutter, RowSchema, StoredRow
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.storage import Store
from shardmill.values import ImageSample, ShardInfo


@dataclass(slots=True)
class _OpenShard:
    """The next shard of a split: chunks that wait, and one under construction."""

    cutter: ChunkCutter
    number: int = 0
    """Number of the shard in its split."""
    chunks: list[list[StoredRow]] = field(default_factory=list)
    num_bytes: int = 0
    """Size of the images in `chunks`."""


class UnitShards:
    """Shards of one unit. All splits together hold `shard_max_bytes` of images, and while a shard is written its file.

    Where rows are cut follows from their order and sizes alone. A chunk that would exceed the limit closes the largest
    shard of any split: the order of the chunks, and so the layout, is the same wherever shards end.
    """

    def __init__(self, store: Store, unit_index: int, task: UnitTask) -> None:
        self.accepted_key_sum = 0
        self.note_counts: Counter[str] = Counter()
        self._store, self._task = store, task
        self._unit_index, self._attempt = unit_index, uuid.uuid4().hex[:12]
        self._open: dict[str, _OpenShard] = {}
        self._sums: dict[str, SplitSums] = {}
        self._published: dict[str, list[ShardInfo]] = {}

    def add(self, split: str, row: StoredRow) -> None:
        """The unit's next row. Raises StorageError if a shard cannot be stored."""
        if split not in self._open:
            self._open[split] = _OpenShard(ChunkCutter(self._task.config.chunk_bytes))
        if chunk := self._open[split].cutter.add(row):
            self._add_chunk(split, chunk)

    def finish(self) -> None:
        """Publish what is left."""
        for split in sorted(self._open):
            if chunk := self._open[split].cutter.rest():
                self._add_chunk(split, chunk)
        self._close(sorted(split for split, shard in self._open.items() if shard.chunks))

    @property
    def shards(self) -> tuple[ShardInfo, ...]:
        """Return the shards in layout order."""
        return tuple(itertools.chain.from_iterable(self._published[split] for split in sorted(self._published)))

    @property
    def splits(self) -> tuple[SplitSums, ...]:
        """Sums of all rows, by name of the split."""
        return tuple(self._sums[split] for split in sorted(self._sums))

    def _add_chunk(self, split: str, chunk: list[StoredRow]) -> None:
        num_bytes = sum(row.image_bytes for row in chunk)
        while self._num_waiting_bytes + num_bytes > self._task.config.shard_max_bytes and self._num_waiting_bytes:
            self._close([max(sorted(self._open), key=lambda split: self._open[split].num_bytes)])
        self._open[split].chunks.append(chunk)
        self._open[split].num_bytes += num_bytes

    @property
    def _num_waiting_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self._open.values())

    def _close(self, splits: Sequence[str]) -> None:
        """Publish the shards of these splits at once, because what takes time here is a disk that syncs, or a distant
        store. Count their rows.
        """
        with ThreadPoolExecutor(max(1, len(splits)), "shardmill-publish") as pool:
            for split, published in zip(splits, pool.map(self._publish, splits), strict=True):
                self._published.setdefault(split, []).extend(published)
        for shard, split in ((self._open[split], split) for split in splits):
            self._count(split, [row for chunk in shard.chunks for row in chunk])
            shard.chunks, shard.num_bytes = [], 0
            shard.number += 1

    def _publish(self, split: str) -> list[ShardInfo]:
        """A split's shard in every format, one after the other: their bytes are in memory."""
        task, shard = self._task, self._open[split]
        name = f"{self._unit_index:06d}-{shard.number:03d}-{self._attempt}"
        return [
            publish_shard(self._store, split, name, format_name, shard.chunks, schema=task.row_schema)
            for format_name in (() if task.is_check else task.config.formats)
        ]

    def _count(self, split: str, rows: Sequence[StoredRow]) -> None:
        sums = _split_sums(split, rows, self._task.row_schema)
        self._sums[split] = self._sums[split].plus(sums) if split in self._sums else sums
        self.accepted_key_sum = add_digests(self.accepted_key_sum, *(key_hash(row.source.key) for row in rows))
        self.note_counts.update(note for row in rows for note in row.sample.notes)


def _split_sums(split: str, rows: Sequence[StoredRow], schema: RowSchema) -> SplitSums:
    return SplitSums(
        split=split,
        num_rows=len(rows),
        image_bytes=sum(row.image_bytes for row in rows),
        class_counts=schema.class_counts((row.label_id for row in rows), (row.source.extra for row in rows)),
        row_digest_sum=format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows))),
        num_pixels=sum(row.sample.height * row.sample.width for row in rows),
        channel_sums=_sum_columns(row.sample.channel_sums for row in rows),
        channel_square_sums=_sum_columns(row.sample.channel_square_sums for row in rows),
        sizes=_sizes([row.sample for row in rows]),
    )


def _sizes(samples: Sequence[ImageSample]) -> ImageSizes:
    heights, widths = [each.source_height for each in samples], [each.source_width for each in samples]
    return ImageSizes(
        source=count_sizes(heights, widths, sum(each.source_bytes for each in samples)),
        stored=count_sizes(
            [each.height for each in samples],
            [each.width for each in samples],
            sum(len(each.image) for each in samples),
        ),
    )


def _sum_columns(rows: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))
