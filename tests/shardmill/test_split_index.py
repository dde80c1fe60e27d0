"""The index of readers: columns that say what the shards' values say, and refuse what these refuse."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.checksummed import checksum_file
from shardmill.dataset import chunks
from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.index import index_table, shards_of_table
from shardmill.dataset.open import open_dataset
from shardmill.dataset.segment import put_segment
from shardmill.dataset.split_index import SplitIndex, _read_parts, read_index
from shardmill.errors import IntegrityError, SecurityRefusal
from shardmill.stores import STORES, open_store
from shardmill.values import ShardFile, ShardInfo
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.lab.datasets import make_dataset


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of several shards in each split and both formats."""
    return make_dataset(tmp_path_factory.mktemp("indexed"), num_images=120, shard_max_bytes=20_000)


def assert_says(index: SplitIndex, shards: tuple[ShardInfo, ...]) -> None:
    infos = [chunk for shard in shards for chunk in shard.chunks]
    assert index.num_chunks == len(infos) and index.num_shards == len(shards) > 1
    for field in fields(ShardFile):
        found = [getattr(index.shard(number), field.name) for number in range(index.num_shards)]
        assert found == [getattr(shard, field.name) for shard in shards]
    places = iter(infos)
    for number, shard in enumerate(shards):
        for place, info in enumerate(shard.chunks):
            found = index.chunk(int(index.first_chunk_of_shard[number]) + place)
            assert next(places) == info and (found.shard, found.number) == (number, place)
            assert (found.place.start, found.place.num_bytes) == (info.start, info.num_bytes)
            assert (found.num_rows, found.crc32c) == (info.num_rows, info.crc32c)
    assert index.chunk_rows.tolist() == [info.num_rows for info in infos]
    assert index.image_bytes.tolist() == [info.image_bytes for info in infos]
    assert index.max_chunk_bytes == max(info.image_bytes for info in infos)
    assert index.paths == [shard.path for shard in shards]


def test_columns_say_what_the_values_say(uri: str):
    dataset = open_dataset(uri)
    for split in dataset.manifest.splits:
        for name in dataset.manifest.formats:
            assert_says(dataset.index(split, name), dataset.shards_of(split, name))
    shards = dataset.shards_of("train", "parquet")
    assert_says(SplitIndex.of(shards), shards)


def test_segments_of_any_shape_are_joined_in_their_order(uri: str, tmp_path: Path):
    """Each shard a segment of its own; formats and splits mixed; without dictionaries, in several row groups."""
    dataset = open_dataset(uri)
    store = open_store(str(tmp_path))
    segments = tuple(put_segment(store, "indexes", index_table([shard])) for shard in dataset.shards)
    manifest = dataset.manifest.model_copy(update={"index_segments": segments})
    for (split, name), index in read_index(store, manifest).items():
        assert_says(index, dataset.shards_of(split, name))
    table = index_table(sorted(dataset.shards, key=lambda shard: shard.sha256))
    out = pa.BufferOutputStream()
    pq.write_table(table, out, use_dictionary=False, row_group_size=3)
    store.put("indexes/mixed.parquet", out.getvalue().to_pybytes())
    file = checksum_file("indexes/mixed.parquet", out.getvalue().to_pybytes())
    found = read_index(store, manifest.model_copy(update={"index_segments": (file,)}))
    for (split, name), index in found.items():
        mine = [each for each in shards_of_table(table) if (each.split, each.format) == (split, name)]
        assert_says(index, tuple(mine))


def _first(shard: ShardInfo, **changed: int) -> ShardInfo:
    return replace(shard, chunks=(replace(shard.chunks[0], **changed), *shard.chunks[1:]))


@pytest.mark.parametrize(
    "change",
    [
        lambda shard: _first(shard, start=-4),
        lambda shard: _first(shard, num_bytes=1 << 62),
        lambda shard: _first(shard, num_rows=(1 << 63) // 64 + 1),
        lambda shard: _first(shard, num_rows=0),
        lambda shard: _first(shard, image_bytes=-1),
        lambda shard: _first(shard, crc32c=1 << 40),
        lambda shard: replace(shard, chunks=(shard.chunks[0], *shard.chunks[2:])),
        lambda shard: replace(shard, chunks=shard.chunks[::-1]),
        lambda shard: replace(shard, num_rows=shard.num_rows + 1),
        lambda shard: replace(shard, footer_bytes=shard.footer_bytes + 1),
        lambda shard: replace(shard, footer_start=(1 << 63) - 1, size_bytes=(1 << 63) - 1, footer_bytes=0),
        lambda shard: replace(shard, path="../outside"),
        lambda shard: replace(shard, rows_path="rows/../../x"),
        lambda shard: replace(shard, path="shards/%2e%2e/%2e%2e/x"),
        lambda shard: replace(shard, path="shards/..hidden/../x"),
    ],
)
def test_what_no_file_has_is_refused_as_the_values_refuse_it(uri: str, tmp_path: Path, change):
    shards = open_dataset(uri).shards_of("train", "parquet")
    target = next(number for number, shard in enumerate(shards) if len(shard.chunks) > 2)
    table = index_table([change(shard) if number == target else shard for number, shard in enumerate(shards)])
    store = open_store(str(tmp_path))
    with pytest.raises((IntegrityError, SecurityRefusal)):
        _read_parts(store, put_segment(store, "indexes", table), 10_000)
    path = table.column("shard")[0].as_py()
    empty = table.set_column(2, "shard", pa.array([None if each == path else each for each in table[2].to_pylist()]))
    with pytest.raises(IntegrityError, match="empty fields"):
        _read_parts(store, put_segment(store, "indexes", empty), 10_000)


def test_the_footers_that_a_reader_keeps_are_bounded(uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    dataset = open_dataset(f"{SCHEME}://{uri}")
    index = dataset.index("train", "parquet")
    footer_bytes = max(shard.footer_bytes for shard in dataset.shards_of("train", "parquet"))
    monkeypatch.setattr(chunks, "_MAX_FOOTER_BYTES", 2 * (footer_bytes + chunks._SHARD_BYTES))
    fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
    everything = [fetcher.read_chunk(number) for number in range(index.num_chunks)]
    assert 1 <= len(fetcher._opened) <= 2 and not fetcher._opening
    CALLS.clear()
    again = fetcher.read_chunk(0)
    assert CALLS["read_range"] == 2 and np.array_equal(again.sample_ids_N, everything[0].sample_ids_N)
    fetcher.read_chunk(0)
    assert CALLS["read_range"] == 3


@pytest.mark.starts("program")
def test_the_first_batch_imports_no_pandas(uri: str):
    """pyarrow would, where it is installed: a second on a busy machine."""
    program = (
        "import sys, shardmill\n"
        f"for name in ('parquet', 'tfrecord'):\n"
        f"    next(iter(shardmill.open_dataset({uri!r}).batches('train', global_batch_size=8, format=name)))\n"
        "print('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
