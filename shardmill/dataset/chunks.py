"""Reads a chunk of a shard as verified bytes and rows: the only place where a reader touches storage."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import google_crc32c

from shardmill.dataset.segment import RESTORE
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, ChunkRows, RowSchema
from shardmill.storage import Store, join_uri
from shardmill.values import ShardInfo

if TYPE_CHECKING:
    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.dataset.index import SplitIndex


class ChunkFetcher:
    """Reads chunks of one split in one format. Safe to use from several threads."""

    def __init__(self, store: Store, index: SplitIndex, schema: RowSchema, cache: ChunkCache | None = None) -> None:
        self.index = index
        self._cache = cache
        self._schema = schema
        self._store = store
        self._format = SHARD_FORMATS[index.format]
        self._footers: dict[str, object] = {}
        self._fetching = {shard.path: threading.Lock() for shard in index.shards}

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of chunk number `chunk`. Raises IntegrityError naming shard and chunk, for any altered byte."""
        number = int(self.index.shard_of_chunk[chunk])
        shard = self.index.shards[number]
        info = self.index.chunks[chunk]
        chunk_in_shard = chunk - int(self.index.first_chunk_of_shard[number])
        footer = self._footer(shard)
        place = ByteRange(info.start, info.num_bytes)
        data = self._bytes(shard, place, info.crc32c, f"chunk {chunk_in_shard}")
        rows = self._format.read_chunk(footer, chunk_in_shard, place, data, self._schema)
        if len(rows.images) != info.num_rows:
            raise IntegrityError(
                f"chunk {chunk_in_shard} of {join_uri(self._store.uri, shard.path)} has {len(rows.images)} rows",
                f"expected {info.num_rows}",
            )
        return rows

    def _footer(self, shard: ShardInfo) -> object:
        # Whoever else needs it waits, in place of a request of its own.
        with self._fetching[shard.path]:
            if shard.path not in self._footers:
                place = ByteRange(shard.footer_start, shard.footer_bytes)
                data = self._bytes(shard, place, shard.footer_crc32c, "footer", is_last=True)
                self._footers[shard.path] = self._format.open_footer(place, data)
            return self._footers[shard.path]

    def _bytes(self, shard: ShardInfo, place: ByteRange, crc32c: int, what: str, *, is_last: bool = False) -> bytes:
        def fetch() -> bytes:
            # One byte more than the index names: it must not be there if the file ends where its footer ends.
            data = self._read(shard, ByteRange(place.start, place.num_bytes + is_last))
            return self._verified(shard, place, data, crc32c, what)

        return fetch() if self._cache is None else self._cache.read(shard.sha256, place, crc32c, fetch)

    def _read(self, shard: ShardInfo, place: ByteRange) -> bytes:
        # A store allocates what the file holds, not what is asked for: a size that an index invents costs nothing.
        try:
            return self._store.read_range(shard.path, place.start, place.num_bytes)
        except FileNotFoundError:
            uri = join_uri(self._store.uri, shard.path)
            raise IntegrityError(f"shard {uri} is missing", f"expected {shard.size_bytes} bytes", RESTORE) from None

    def _verified(self, shard: ShardInfo, place: ByteRange, data: bytes, crc32c: int, what: str) -> bytes:
        uri = join_uri(self._store.uri, shard.path)
        if len(data) != place.num_bytes:
            raise IntegrityError(
                f"shard {uri} does not have {shard.size_bytes} bytes: its {what} has {len(data)}",
                f"expected {place.num_bytes}",
                RESTORE,
            )
        actual = google_crc32c.value(data)
        if actual != crc32c:
            raise IntegrityError(
                f"{what} of shard {uri} was altered: CRC-32C {actual:08x}", f"expected {crc32c:08x}", RESTORE
            )
        return data
