"""Rows of equal bytes are brought together wherever the work runs: the same counts, the same copies, the same order."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark import SparkContext

from etl.checks.duplicates import count_copies, find_copies
from etl.config import EtlConfig
from etl.engines import EngineSettings, auto, spark
from etl.engines.spark import group_on_spark
from etl.listing import list_source
from etl.listing.grouping import Group, GroupBy, group_here
from etl.listing.spill import SpilledRows
from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.shard import publish_shard
from shardmill.errors import StorageError
from shardmill.formats.rows import RowSchema, StoredRow
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.spark import one_spark, spark_context
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import ImageSample, ShardInfo, SourceImage
from tests.etl.building import COLLIDING, images_of
from tests.etl.listings import facts, listed

CLASS_NAMES = ("a", "b")
SCHEMA = RowSchema("raw", (1, 1, 1), CLASS_NAMES)
CONFIG = EtlConfig()
# Of the shards: their first rows, and the end of the last; their splits.
_BOUNDS, _SPLITS = (0, 7, 8, 30, 60), ("train", "test", "train", "validation")


def row(number: int, source_sha256: str, label_id: int) -> StoredRow:
    source = SourceImage(f"{number}.png", 1, label=CLASS_NAMES[label_id], sample_id=number)
    return StoredRow.of(source, label_id, ImageSample(b"x", 1, 1, 1, source_sha256, (120,), (14400,)))


def in_small_parts(group: Group) -> Group:
    return lambda asked: group(replace(asked, rows_per_part=9))


@pytest.fixture
def rows() -> list[StoredRow]:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Few digests, so that they repeat; of each prefix there are two, so that a prefix alone proves nothing.
    prefixes = [rng.randbytes(8).hex() for _ in range(20)]
    digests = [prefix + rest for prefix in prefixes for rest in ("00" * 24, "11" * 24)]
    return [row(number, rng.choice(digests), rng.randrange(2)) for number in rng.sample(range(10_000), 60)]


def write_shards(store: Store, rows: list[StoredRow]) -> list[ShardInfo]:
    bounds = list(itertools.pairwise(_BOUNDS))
    return [
        publish_shard(store, split, f"{first}", "parquet", [rows[first:end]], schema=SCHEMA)
        for split, (first, end) in zip(_SPLITS, bounds, strict=True)
    ]


def counted_by_hand(rows: list[StoredRow]) -> DuplicateCounts:
    times = Counter(row.sample.source_sha256 for row in rows)
    labels = {digest: {row.label_id for row in rows if row.sample.source_sha256 == digest} for digest in times}
    conflicting = sum(count for digest, count in times.items() if len(labels[digest]) > 1)
    splits = {digest: set() for digest in times}
    for place, each in enumerate(rows):
        splits[each.sample.source_sha256].add(_SPLITS[bisect.bisect(_BOUNDS, place) - 1])
    leaked = sum(count for digest, count in times.items() if len(splits[digest]) > 1)
    return DuplicateCounts(len(rows) - len(times), conflicting, leaked)


def copies_by_hand(rows: list[StoredRow]) -> dict[str, str]:
    """Key of a copy -> key of its original."""
    originals: dict[str, str] = {}
    for each in rows:
        digest = each.sample.source_sha256
        originals[digest] = min(originals.get(digest, each.source.key), each.source.key)
    return {
        each.source.key: originals[each.sample.source_sha256]
        for each in rows
        if originals[each.sample.source_sha256] != each.source.key
    }


def test_counts_and_copies_are_those_of_all_rows(rows: list[StoredRow], tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    for group in (group_here, in_small_parts(group_here)):
        assert count_copies(store, shards, CONFIG, group) == counted_by_hand(rows)
        found = pa.concat_tables(find_copies(store, shards, CONFIG, group)).to_pylist()
        assert {each["source"]: each["original"] for each in found} == copies_by_hand(rows)
        places = {(each["shard"], each["row"]): each["source"] for each in found}
        assert all(rows[_BOUNDS[shard] + number].source.key == key for (shard, number), key in places.items())
    assert count_copies(store, [], CONFIG, group_here) == DuplicateCounts(0, 0, 0)


@pytest.mark.starts("jvm", "program")
def test_spark_gives_what_one_machine_gives_and_leaves_no_file(
    rows: list[StoredRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    settings = EngineSettings(SparkConfig(master="local[2]"), 0)

    def on_spark(asked: GroupBy) -> Iterator[pa.Table]:
        return group_on_spark(asked, settings)

    with one_spark():
        here, there = (
            list(find_copies(store, shards, CONFIG, in_small_parts(each))) for each in (group_here, on_spark)
        )
        assert len(here) == len(there) == 7
        assert here == there
        # And a listing, which the tasks see only because its ids and its images are copied below the dataset.
        keys = [*COLLIDING, *(f"a/{number % 20}.jpg" for number in range(30))]
        monkeypatch.setattr(list_source, "SEGMENT_ROWS", 5)
        listings = [
            listed(
                *([SourceImage(key, 1)] for key in keys),
                group=lambda asked, group=group: in_small_parts(group)(replace(asked, dataset_uri=store.uri)),
            )
            for group in (group_here, on_spark)
        ]
        assert facts(listings[0]) == facts(listings[1]) and images_of(listings[0]) == images_of(listings[1])
        assert listings[0].segments == listings[1].segments and len(listings[0].segments) == 4
        assert [len(listing.rejections) for listing in listings] == [10, 10]
        with spark_context("another", settings.spark, {}) as context:
            application = context.applicationId
        assert count_copies(store, shards, CONFIG, in_small_parts(on_spark)) == counted_by_hand(rows)
        with spark_context("another", settings.spark, {}) as context:
            assert context.applicationId == application
    assert SparkContext._active_spark_context is None
    assert [file.path for file in store.list("listings")] == []


def test_a_part_is_read_in_the_order_in_which_its_rows_were_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etl.listing.spill.ROWS_PER_PART", 10)
    spilled = SpilledRows(tmp_path, pa.schema([("number", pa.int64())]))
    numbers = pa.array(range(95))
    spilled.add(pa.table([numbers[:0]], names=["number"]), np.empty(0, np.int64))
    assert spilled.read(0).num_rows == 0
    for first in range(0, 95, 4):
        part = pa.table([numbers[first : first + 4]], names=["number"])
        spilled.add(part, part.column("number").to_numpy() % 3)
    assert [spilled.read(part).column("number").to_pylist() for part in range(4)] == [
        list(range(part, 95, 3)) if part < 3 else [] for part in range(4)
    ]


def test_without_a_cluster_auto_groups_any_number_of_rows_here(
    rows: list[StoredRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(auto, "MAX_LOCAL_IMAGES", 1)
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    monkeypatch.setattr(spark, "spark_context", None)
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    settings = EngineSettings(SparkConfig(master="local[2]"), 0)
    counts = count_copies(store, shards, CONFIG, lambda asked: auto.group_automatically(asked, settings))
    assert counts == counted_by_hand(rows)


def test_a_disk_that_is_full_of_rows_is_one_line_of_storage(tmp_path: Path):
    spilled = SpilledRows(tmp_path, pa.schema([("number", pa.int64())]))
    (tmp_path / "part-000000").symlink_to("/dev/full")
    spilled.add(pa.table([pa.array(range(10))], names=["number"]), np.zeros(10, np.int64))
    with pytest.raises(StorageError, match=r"no space to write .*/part-000000 \(\d+ bytes\)"):
        spilled.read(0)
