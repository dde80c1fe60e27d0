"""Reads a chunk of a shard as verified bytes and rows: the only place where a reader touches storage.

Shape legend: N rows of a chunk, D numbers of an embedding.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import google_crc32c
import numpy as np

from shardmill.checksummed import RESTORE
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import ByteRange, ChunkRows, RowSchema
from shardmill.memory import hashed
from shardmill.storage import ReadsIntoMemory, Store, join_uri
from shardmill.values import ShardFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.dataset.dataset import Dataset
    from shardmill.dataset.index import SplitIndex
    from shardmill.memory import RecycledMemory
    from shardmill.values import ShardInfo


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
        self._take = memory.take if memory is not None and self._format.takes_views else None
        self._lock = threading.Lock()
        self._opened: OrderedDict[int, _Opened] = OrderedDict()
        """The shards that were used last, the newest at the end."""
        self._opened_bytes = 0
        self._opening: dict[int, threading.Lock] = {}

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of chunk number `chunk`. Raises IntegrityError naming shard and chunk, for any altered byte."""
        known = self.index.chunk(chunk)
        shard, footer = self._open(known.shard)
        data = self._bytes(shard, known.place, known.crc32c, f"chunk {known.number}", take=self._take)
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
            opened = _Opened(shard, self._format.open_footer(place, bytes(data)))
            with self._lock:
                # Evicted and opened again while this one was read: then it is there already.
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

    def _bytes(
        self, shard: ShardFile, place: ByteRange, crc32c: int, what: str, *,
        is_last: bool = False, take: Callable[[int], np.ndarray] | None = None,
    ) -> bytes | memoryview:  # fmt: skip
        """Verified bytes, from the cache or the storage. `take`: memory for them that is used again when nothing refers
        to them any more; a client of a remote storage makes its own.
        """
        store = self._store

        def fetch() -> bytes | memoryview:
            with _missing_as_integrity_error(store, shard):
                if take is not None and isinstance(store, ReadsIntoMemory):
                    data, actual = hashed(store.read_blocks(shard.path, place.start, place.num_bytes, take))
                else:
                    # One byte more than the index names: it must not be there if the file ends where its footer ends.
                    # What the file holds is allocated, not what is asked for: a size that an index invents costs
                    # nothing.
                    data = store.read_range(shard.path, place.start, place.num_bytes + is_last)
                    actual = google_crc32c.value(data)
            self._verify(shard, place, len(data), actual, crc32c, what)
            return data

        return fetch() if self._cache is None else self._cache.read(shard.sha256, place, crc32c, fetch, take)

    def _verify(self, shard: ShardFile, place: ByteRange, num_bytes: int, actual: int, crc32c: int, what: str) -> None:
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


def with_fetchers(dataset: Dataset, formats: Iterable[str]) -> Iterator[tuple[ShardInfo, ChunkFetcher, int]]:
    """Every shard of a version in these formats, who reads its chunks, and the number of the first of them there."""
    for split in dataset.manifest.splits:
        for format_name in formats:
            index = dataset.index(split, format_name)
            fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
            shards = dataset.shards_of(split, format_name)
            for shard, first_chunk in zip(shards, index.first_chunk_of_shard.tolist(), strict=True):
                yield shard, fetcher, first_chunk


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """One chunk of a version of predictions."""

    split: str
    rows: ChunkRows
    embeddings_ND: np.ndarray
    """float32, read-only."""


def read_embeddings(predictions: Dataset) -> Iterator[EmbeddedRows]:
    """Every chunk of all splits in stored order; the version has embeddings. Raises IntegrityError for an altered
    shard.
    """
    schema = predictions.manifest.row_schema
    for split in predictions.manifest.splits:
        index = predictions.index(split)
        fetcher = ChunkFetcher(predictions.store, index, schema)
        for chunk in range(index.num_chunks):
            rows = fetcher.read_chunk(chunk)
            numbers = np.frombuffer(b"".join(rows.images), "<f4")
            yield EmbeddedRows(split, rows, numbers.reshape(len(rows.images), schema.vector_size))


@contextmanager
def _missing_as_integrity_error(store: Store, shard: ShardFile) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        uri = join_uri(store.uri, shard.path)
        raise IntegrityError(f"shard {uri} is missing", f"expected {shard.size_bytes} bytes", RESTORE) from None
