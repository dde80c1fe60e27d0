"""What the epochs of a loader share changes no batch, has a bound, and is given up when the loader is closed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardmill
from shardmill.dataset.cache_room import open_room
from shardmill.dataset.chunk_cache import ChunkCache
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.loader.reader import BatchReader, read_batches
from shardmill.loader.row_source import ReaderOptions, RowOptions, RowSource
from shardmill.recycled_memory import RecycledMemory
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from shardmill.values import Batch
from tests.far_store import ENTRY, SCHEME
from tests.lab.datasets import make_dataset

BATCH = {"global_batch_size": 8, "seed": 5}


@pytest.fixture(scope="module", params=["png", "raw"])
def uri(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("shared"), encoding=request.param, chunk_bytes=3000)


@pytest.fixture
def chunk_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    sound, reads = LocalStore.read_blocks, Counter()

    def counted(store: LocalStore, path: str, *arguments) -> Iterator[np.ndarray]:
        reads["chunks"] += 1
        return sound(store, path, *arguments)

    monkeypatch.setattr(LocalStore, "read_blocks", counted)
    yield reads


def as_it_is(batch: Batch, origins: object) -> Batch:
    return batch


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_a_split_within_the_windows_is_read_once_for_all_epochs(uri: str, chunk_reads: Counter[str], format: str):
    dataset = shardmill.open_dataset(uri)
    num_chunks = dataset.index("train", format).num_chunks
    expected = [
        batch.images.copy()
        for epoch in range(3)
        for batch in dataset.batches("train", epoch=epoch, format=format, **BATCH)
    ]
    chunk_reads.clear()
    loader = dataset.batches("train", format=format, **BATCH)
    # Batches that are kept have memory of their own, whatever comes later.
    found = [batch.images for _ in range(3) for batch in loader]
    assert all(map(np.array_equal, found, expected)) and len(found) == len(expected)
    assert chunk_reads["chunks"] == num_chunks
    loader.close()
    assert sum(1 for _ in loader) and chunk_reads["chunks"] == 2 * num_chunks, "closed, it keeps nothing"


@pytest.mark.parametrize("num_threads", [1, 4])
def test_epochs_with_one_source_are_those_of_a_reader_each(uri: str, chunk_reads: Counter[str], num_threads: int):
    dataset = shardmill.open_dataset(uri)
    spec = dataset.plan_spec("train", seed=3, global_batch_size=8, num_streams=2, window_bytes=5_000)
    num_chunks, most = dataset.index("train").num_chunks, 2 * spec.window_chunks
    assert most < num_chunks
    source = RowSource(
        dataset, spec, range(2), options=ReaderOptions(num_threads=num_threads, prefetch_bytes=1), rows=RowOptions()
    )
    addresses: set[int] = set()
    for epoch in range(4):
        plan = dataset.plan_epoch(spec, epoch)
        with BatchReader(source, plan, first_step=0, finish=as_it_is) as found, read_batches(dataset, plan) as expected:
            chunk_reads.clear()
            for mine, other in zip(found, expected, strict=True):
                assert np.array_equal(mine.images_NHWC, other.images_NHWC)
                assert np.array_equal(mine.sample_ids_N, other.sample_ids_N)
                addresses.add(mine.images_NHWC.ctypes.data)
        assert len(source._kept) <= most + 2 and len(source._chunk_memory._arrays) <= 2 * most
    assert len(addresses) <= num_threads + 3, "the memory of batches is used again in later epochs"
    source.clear()
    assert not source._kept and not source._chunk_memory._arrays and not source._batch_memory._arrays


def test_a_chunk_that_could_not_be_read_is_read_again_in_the_next_epoch(uri: str, monkeypatch: pytest.MonkeyPatch):
    dataset = shardmill.open_dataset(uri)
    expected = [batch.images.copy() for batch in dataset.batches("train", **BATCH)]
    sound, faults = LocalStore.read_blocks, [True]

    def cut(store: LocalStore, path: str, *arguments) -> Iterator[np.ndarray]:
        blocks = list(sound(store, path, *arguments))
        if faults and faults.pop():
            blocks[-1] = blocks[-1][:-1]
        return iter(blocks)

    monkeypatch.setattr(LocalStore, "read_blocks", cut)
    loader = dataset.batches("train", **BATCH)
    with pytest.raises(IntegrityError, match=r"its chunk \d+ has \d+; expected"):
        list(loader)
    loader.seek(0)
    assert all(map(np.array_equal, [batch.images for batch in loader], expected))


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_chunks_in_the_cache_are_read_to_memory_that_is_used_again(
    uri: str, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    dataset = shardmill.open_dataset(f"{SCHEME}://{uri}")
    index, schema = dataset.index("train", format), dataset.manifest.row_schema
    taken, memory = [], RecycledMemory(2)
    take, memory.take = memory.take, lambda num_bytes: taken.append(num_bytes) or take(num_bytes)
    cache = ChunkCache(open_room(str(tmp_path), None, 0), dataset.store.uri)
    fetcher = ChunkFetcher(dataset.store, index, schema, cache, memory)
    plain = ChunkFetcher(dataset.store, index, schema)
    for _ in range(3):
        for chunk in range(index.num_chunks):
            found, expected = fetcher.read_chunk(chunk), plain.read_chunk(chunk)
            assert [bytes(image) for image in found.images] == [bytes(image) for image in expected.images]
            del found
    assert cache.counts.misses == index.num_chunks + index.num_shards and len(memory._arrays) <= 2
    takes_views = SHARD_FORMATS[format].takes_views
    assert taken == (2 * index.stored_bytes.tolist() if takes_views else []), "the first time a client made its own"


def test_blocks_are_the_bytes_of_a_range_and_take_no_more_memory_than_the_file_has(tmp_path, monkeypatch):
    monkeypatch.setattr("shardmill.recycled_memory._BLOCK_BYTES", 4)
    (tmp_path / "data").write_bytes(b"0123456789")
    store, taken = LocalStore(str(tmp_path)), []

    def take(num_bytes: int) -> np.ndarray:
        taken.append(num_bytes)
        return np.empty(num_bytes, np.uint8)

    assert [bytes(block) for block in store.read_blocks("data", 1, 6, take)] == [b"1234", b"123456"]
    assert [bytes(block) for block in store.read_blocks("data", 3, 1 << 50, take)] == [b"3456", b"3456789"]
    assert not list(store.read_blocks("data", 10, 5, take)) and not list(store.read_blocks("data", 99, 5, take))
    assert taken == [6, 7, 0, 0]
    with pytest.raises(FileNotFoundError):
        list(store.read_blocks("nothing", 0, 1, take))
