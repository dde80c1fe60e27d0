"""Chunk number -> verified bytes -> rows: the one place where a reader touches storage."""

from __future__ import annotations

import threading

import google_crc32c

from shardmill.dataset.index import SplitIndex
from shardmill.dataset.segment import RESTORE
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, ChunkRows
from shardmill.storage import Store, join_uri
from shardmill.values import ShardInfo


class ChunkFetcher:
    """Reads chunks of one split in one format. Safe to use from several threads."""

    def __init__(self, store: Store, index: SplitIndex) -> None:
        self.index = index
        self._store = store
        self._format = SHARD_FORMATS[index.format]
        self._footers: dict[str, object] = {}
        self._lock = threading.Lock()

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of chunk number `chunk`. Raises IntegrityError naming shard and chunk for any altered byte."""
        place = int(self.index.shard_of_chunk[chunk])
        shard = self.index.shards[place]
        info = self.index.chunks[chunk]
        chunk_in_shard = chunk - int(self.index.first_chunk_of_shard[place])
        footer = self._footer(shard)
        where = ByteRange(info.start, info.num_bytes)
        data = self._verified_range(shard, where, info.crc32c, f"chunk {chunk_in_shard}")
        rows = self._format.read_chunk(footer, chunk_in_shard, where, data)
        if len(rows.images) != info.num_rows:
            raise IntegrityError(
                f"chunk {chunk_in_shard} of {join_uri(self._store.uri, shard.path)} has {len(rows.images)} rows",
                f"expected {info.num_rows}",
            )
        return rows

    def _footer(self, shard: ShardInfo) -> object:
        with self._lock:
            if shard.path in self._footers:
                return self._footers[shard.path]
        # Before anything is allocated: a chunk is as large as the index says, and lies inside the file.
        found = self._store.stat(shard.path)
        if found is not None and found.size_bytes != shard.num_bytes:
            raise IntegrityError(
                f"shard {join_uri(self._store.uri, shard.path)} has {found.size_bytes} bytes",
                f"expected {shard.num_bytes} bytes",
                RESTORE,
            )
        where = ByteRange(shard.footer_start, shard.footer_bytes)
        data = self._verified_range(shard, where, shard.footer_crc32c, "footer")
        footer = self._format.open_footer(where, data)
        with self._lock:
            self._footers[shard.path] = footer
        return footer

    def _verified_range(self, shard: ShardInfo, where: ByteRange, crc32c: int, what: str) -> bytes:
        uri = join_uri(self._store.uri, shard.path)
        try:
            data = self._store.read_range(shard.path, where.start, where.num_bytes)
        except FileNotFoundError:
            raise IntegrityError(f"shard {uri} is missing", f"expected {shard.num_bytes} bytes", RESTORE) from None
        if len(data) != where.num_bytes:
            raise IntegrityError(
                f"{what} of shard {uri} is cut: {len(data)} bytes", f"expected {where.num_bytes} bytes", RESTORE
            )
        actual = google_crc32c.value(data)
        if actual != crc32c:
            raise IntegrityError(
                f"{what} of shard {uri} was altered: CRC-32C {actual:08x}", f"expected {crc32c:08x}", RESTORE
            )
        return data
