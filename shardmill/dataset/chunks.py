"""Reads a chunk of a shard as verified bytes and rows: the only place where a reader touches storage."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np

from shardmill.dataset.segment import RESTORE
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, ChunkRows, RowSchema
from shardmill.storage import ReadsIntoMemory, Store, join_uri
from shardmill.values import ShardFile

if TYPE_CHECKING:
    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.dataset.split_index import ChunkPlace, SplitIndex
    from shardmill.recycled_memory import RecycledMemory


# Of footers as they are stored; parsed by pyarrow 14 they take 16 times as much, so that 300 of 13 KB are 64 MB.
_MAX_FOOTER_BYTES = 4_000_000
# On that scale, what is kept of a shard beside its footer, which some formats do not have.
_SHARD_BYTES = 100


class _Opened(NamedTuple):
    shard: ShardFile
    footer: object


class ChunkFetcher:
    """Reads chunks of one split in one format. Safe to use from several threads."""

    def __init__(
        self, store: Store, index: SplitIndex, schema: RowSchema, cache: ChunkCache | None = None,
        memory: RecycledMemory | None = None,
    ) -> None:  # fmt: skip
        self.index = index
        self._cache = cache
        self._schema = schema
        self._store = store
        self._format = SHARD_FORMATS[index.format]
        self._memory = memory if cache is None and self._format.takes_views else None
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        """The shards that were used last, the newest at the end."""
        self._opened_bytes = 0
        self._opening: dict[int, threading.Lock] = {}

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of chunk number `chunk`. Raises IntegrityError naming shard and chunk, for any altered byte."""
        known = self.index.chunk(chunk)
        shard, footer = self._open(known.shard)
        if self._memory is not None and isinstance(self._store, ReadsIntoMemory):
            data = self._recycled(self._memory, self._store, shard, known)
        else:
            data = self._bytes(shard, known.place, known.crc32c, f"chunk {known.number}")
        rows = self._format.read_chunk(footer, known.number, known.place, data, self._schema)
        if len(rows.images) != known.num_rows:
            raise IntegrityError(
                f"chunk {known.number} of {join_uri(self._store.uri, shard.path)} has {len(rows.images)} rows",
                f"expected {known.num_rows}",
            )
        return rows

    def _open(self, number: int) -> _Opened:
        """A shard with its footer: one that was used lately, or is fetched."""
        with self._lock:
            if (opened := self._known(number)) is not None:
                return opened
            opening = self._opening.setdefault(number, threading.Lock())
        # Whoever else needs it waits, in place of a request of its own.
        with opening:
            with self._lock:
                if (opened := self._known(number)) is not None:
                    return opened
            shard = self.index.shard(number)
            place = ByteRange(shard.footer_start, shard.footer_bytes)
            data = self._bytes(shard, place, shard.footer_crc32c, "footer", is_last=True)
            opened = _Opened(shard, self._format.open_footer(place, data))
            with self._lock:
                # Evicted and read by another thread meanwhile, it is there already.
                if number not in self._opened:
                    self._opened[number] = opened
                    self._opened_bytes += shard.footer_bytes + _SHARD_BYTES
                while self._opened_bytes > _MAX_FOOTER_BYTES and len(self._opened) > 1:
                    _, (oldest, _) = self._opened.popitem(last=False)
                    self._opened_bytes -= oldest.footer_bytes + _SHARD_BYTES
                self._opening.pop(number, None)
            return opened

    def _known(self, number: int) -> _Opened | None:
        if number in self._opened:
            self._opened.move_to_end(number)
        return self._opened.get(number)

    def _bytes(self, shard: ShardFile, place: ByteRange, crc32c: int, what: str, *, is_last: bool = False) -> bytes:
        def fetch() -> bytes:
            # One byte more than the index names: it must not be there if the file ends where its footer ends.
            with _named(self._store, shard):
                # What the file holds is allocated, not what is asked for: a size that an index invents costs nothing.
                data = self._store.read_range(shard.path, place.start, place.num_bytes + is_last)
            self._verify(shard, place, len(data), google_crc32c.value(data), crc32c, what)
            return data

        return fetch() if self._cache is None else self._cache.read(shard.sha256, place, crc32c, fetch)

    def _recycled(
        self, memory: RecycledMemory, store: ReadsIntoMemory, shard: ShardFile, known: ChunkPlace
    ) -> memoryview:
        """The bytes of a chunk, in memory that is used again when nothing refers to them any more."""
        data, actual, num_hashed = np.empty(0, np.uint8), 0, 0
        with _named(self._store, shard):
            for data in store.read_blocks(shard.path, known.place.start, known.place.num_bytes, memory.take):
                actual = google_crc32c.extend(actual, data[num_hashed:])
                num_hashed = len(data)
        self._verify(shard, known.place, num_hashed, actual, known.crc32c, f"chunk {known.number}")
        return data.data.toreadonly()

    def _verify(
        self, shard: ShardFile, place: ByteRange, num_bytes: int, actual: int, crc32c: int, what: str
    ) -> None:  # fmt: skip
        uri = join_uri(self._store.uri, shard.path)
        if num_bytes != place.num_bytes:
            raise IntegrityError(
                f"shard {uri} does not have {shard.size_bytes} bytes: its {what} has {num_bytes}",
                f"expected {place.num_bytes}",
                RESTORE,
            )
        if actual != crc32c:
            raise IntegrityError(
                f"{what} of shard {uri} was altered: CRC-32C {actual:08x}", f"expected {crc32c:08x}", RESTORE
            )


@contextmanager
def _named(store: Store, shard: ShardFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        uri = join_uri(store.uri, shard.path)
        raise IntegrityError(f"shard {uri} is missing", f"expected {shard.size_bytes} bytes", RESTORE) from None
