"""The one rule that cuts rows into chunks and shards.

Where rows are cut follows from the stored image bytes alone, so all formats of a dataset have the same chunks.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardmill.formats.rows import StoredRow

# What a row without image and vector takes at least.
_ROW_BYTES = 128


class ChunkCutter:
    """The rule that cuts rows into chunks, for rows that come one by one: a chunk is closed as soon as its images reach
    `chunk_bytes`.
    """

    # Closed by size alone, never by a limit of rows: so chunks are equal in every format, and so are plans.
    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._rows: list[StoredRow] = []
        self._num_bytes = 0

    def add(self, row: StoredRow) -> list[StoredRow]:
        """The chunk that this row closes; empty if it closes none."""
        self._rows.append(row)
        self._num_bytes += row.image_bytes or _ROW_BYTES
        return self.rest() if self._num_bytes >= self._chunk_bytes else []

    def rest(self) -> list[StoredRow]:
        """The rows of the chunk that is open, which is closed."""
        rows, self._rows, self._num_bytes = self._rows, [], 0
        return rows


def cut_chunks(rows: Iterable[StoredRow], chunk_bytes: int) -> Iterable[list[StoredRow]]:
    """The chunks of rows that come in order; see `ChunkCutter`."""
    cutter = ChunkCutter(chunk_bytes)
    for row in rows:
        if chunk := cutter.add(row):
            yield chunk
    if chunk := cutter.rest():
        yield chunk


def cut_shards(chunks: Iterable[list[StoredRow]], shard_max_bytes: int) -> Iterable[list[list[StoredRow]]]:
    """Runs of chunks, each closed before its images would exceed `shard_max_bytes` (one chunk always fits)."""
    shard: list[list[StoredRow]] = []
    size = 0
    for chunk in chunks:
        chunk_size = sum(row.image_bytes or _ROW_BYTES for row in chunk)
        if shard and size + chunk_size > shard_max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(chunk)
        size += chunk_size
    if shard:
        yield shard
