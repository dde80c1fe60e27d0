"""Writes rows of a work unit to shards while later ones are decoded, so that memory does not grow with the unit; rows
that were read in another order than the unit's wait first, those that do not fit in memory in a file.
"""

from __future__ import annotations

import itertools
import socket
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import IO

from etl.units.units import UnitTask
from shardmill.dataset.build import SplitSums
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.statistics import ImageSizes, count_sizes
from shardmill.errors import StorageError
from shardmill.formats.rows import ChunkCutter, RowSchema, StoredRow
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.values import ShardInfo


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
        task = self._task

        def publish(split: str) -> list[ShardInfo]:
            """A split's shard in every format, one after the other: their bytes are in memory."""
            shard = self._open[split]
            name = f"{self._unit_index:06d}-{shard.number:03d}-{self._attempt}"
            return [
                publish_shard(self._store, split, name, format_name, shard.chunks, schema=task.row_schema)
                for format_name in (() if task.is_check else task.config.formats)
            ]

        with ThreadPoolExecutor(max(1, len(splits)), "shardmill-publish") as pool:
            for split, published in zip(splits, pool.map(publish, splits), strict=True):
                self._published.setdefault(split, []).extend(published)
        for shard, split in ((self._open[split], split) for split in splits):
            rows = [row for chunk in shard.chunks for row in chunk]
            sums = _split_sums(split, rows, task.row_schema)
            self._sums[split] = self._sums[split].plus(sums) if split in self._sums else sums
            self.accepted_key_sum = add_digests(self.accepted_key_sum, *(key_hash(row.source.key) for row in rows))
            self.note_counts.update(note for row in rows for note in row.sample.notes)
            shard.chunks, shard.num_bytes = [], 0
            shard.number += 1


def _split_sums(split: str, rows: Sequence[StoredRow], schema: RowSchema) -> SplitSums:
    samples = [row.sample for row in rows]
    sources = ([each.source_height for each in samples], [each.source_width for each in samples])
    stored = ([each.height for each in samples], [each.width for each in samples])
    image_bytes = sum(row.image_bytes for row in rows)
    return SplitSums(
        split=split,
        num_rows=len(rows),
        image_bytes=image_bytes,
        class_counts=schema.class_counts((row.label_id for row in rows), (row.source.extra for row in rows)),
        row_digest_sum=format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows))),
        num_pixels=sum(each.height * each.width for each in samples),
        channel_sums=_sum_columns(each.channel_sums for each in samples),
        channel_square_sums=_sum_columns(each.channel_square_sums for each in samples),
        sizes=ImageSizes(
            source=count_sizes(*sources, sum(each.source_bytes for each in samples)),
            stored=count_sizes(*stored, sum(len(each.image) for each in samples)),
        ),
    )


def _sum_columns(rows: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


@dataclass(slots=True)
class _Waiting:
    """A row whose turn has not come."""

    split: str
    row: StoredRow
    """Without its image, if that is in the file."""
    start: int = 0
    """Offset of its image in the file."""
    num_bytes: int = 0


def in_unit_order(
    rows: Iterable[tuple[str, StoredRow]], order: Iterable[str], max_bytes: int, folder: str
) -> Iterator[tuple[str, StoredRow]]:
    """Each row, with the name of its split, in the `order` of its keys. All of `rows` are taken before the first comes.

    Images of `max_bytes` are in memory; more of them are in an unnamed file in `folder`, the system's temporary folder
    if it is empty. Raises StorageError if that is full.
    """
    folder = folder or tempfile.gettempdir()
    waiting: dict[str, _Waiting] = {}
    in_memory: list[_Waiting] = []
    num_bytes = 0
    # Nobody else sees the file, and it ends with this process.
    file: IO[bytes] | None = None
    with ExitStack() as stack:
        for split, row in rows:
            waiting[row.source.key] = _Waiting(split, row)
            in_memory.append(waiting[row.source.key])
            num_bytes += row.image_bytes
            if num_bytes > max_bytes:
                file = file or stack.enter_context(_unnamed_file(folder))
                _move_images(in_memory, file, folder)
                in_memory, num_bytes = [], 0
        if file is not None:
            # What the caller collects takes as much memory again.
            _move_images(in_memory, file, folder)
        del in_memory
        for key in order:
            if key not in waiting:
                continue
            found = waiting.pop(key)
            if file is not None:
                with as_storage_error(folder):
                    file.seek(found.start)
                    image = file.read(found.num_bytes)
                found.row = replace(found.row, sample=replace(found.row.sample, image=image))
            yield found.split, found.row


def _unnamed_file(folder: str) -> IO[bytes]:
    try:
        with as_storage_error(folder):
            return tempfile.TemporaryFile(dir=folder)
    except FileNotFoundError:
        raise StorageError(
            f"{folder} does not exist on host {socket.gethostname()}",
            "expected etl.scratch_dir on every host that writes shards",
            "create it there, or set etl.scratch_dir to another folder",
        ) from None


def _move_images(rows: Iterable[_Waiting], file: IO[bytes], folder: str) -> None:
    """To the end of the file."""
    with as_storage_error(folder):
        for each in rows:
            each.start, each.num_bytes = file.tell(), file.write(each.row.sample.image)
            each.row = replace(each.row, sample=replace(each.row.sample, image=b""))
