"""Counts of duplicates are exact, although the driver gets only the first bytes of each digest."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from shardmill.dataset.duplicates import DuplicateCounts, count_duplicates_of_units
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.unit_result import SplitSums, UnitResult, encode_prefixes
from shardmill.formats.rows import RowSchema, StoredRow
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import ImageSample, ShardInfo, SourceImage

CLASS_NAMES = ("a", "b")
SCHEMA = RowSchema("raw", (1, 1, 1), CLASS_NAMES)


def row(number: int, source_sha256: str, label_id: int) -> StoredRow:
    source = SourceImage(f"{number}.png", 1, label=CLASS_NAMES[label_id], sample_id=number)
    return StoredRow.of(source, label_id, ImageSample(b"x", 1, 1, 1, source_sha256, (120,), (14400,)))


def write_result(store: Store, unit: int, splits: dict[str, list[list[StoredRow]]], scratch: Path) -> UnitResult:
    """A unit's result, with every inner list of rows in a shard of its own."""
    shards: list[ShardInfo] = []
    sums: list[SplitSums] = []
    for split, parts in splits.items():
        rows = [row for part in parts for row in part]
        for number, part in enumerate(parts):
            for name in ("tfrecord", "parquet"):
                shards.append(
                    publish_shard(store, split, f"{unit}-{number}", name, [part], schema=SCHEMA, scratch=scratch)
                )
        prefixes = encode_prefixes(row.sample.source_sha256 for row in rows)
        sums.append(SplitSums(split, len(rows), len(rows), (0, 0), "0", 0, (0,), (0,), prefixes))
    return UnitResult(unit, "", tuple(shards), tuple(sums), (), "0", "0", ())


def counted_by_hand(rows: list[StoredRow]) -> DuplicateCounts:
    times = Counter(row.sample.source_sha256 for row in rows)
    labels = {digest: {row.label_id for row in rows if row.sample.source_sha256 == digest} for digest in times}
    conflicting = sum(count for digest, count in times.items() if len(labels[digest]) > 1)
    return DuplicateCounts(len(rows) - len(times), conflicting)


@pytest.mark.parametrize("round_number", range(5))
def test_counts_are_those_of_all_rows(round_number: int, tmp_path: Path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Few digests, so that they repeat; of each prefix there are two, so that a prefix alone proves nothing.
    digests = [
        prefix + rest for prefix in (rng.randbytes(8).hex() for _ in range(20)) for rest in ("00" * 24, "11" * 24)
    ]
    rows = [row(number, rng.choice(digests), rng.randrange(2)) for number in range(30)]
    store = open_store(tmp_path / "dataset")
    results = [
        write_result(store, 0, {"train": [rows[:7], rows[7:12]], "test": [rows[12:14]]}, tmp_path),
        write_result(store, 1, {"train": [rows[14:20], rows[20:]]}, tmp_path),
    ]
    assert count_duplicates_of_units(store, results, "parquet") == counted_by_hand(rows)


def test_rows_without_a_double_are_not_read_again(tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    rows = [row(number, f"{number:016x}{0:048x}", 0) for number in range(6)]
    double = row(9, rows[0].sample.source_sha256, 1)
    results = [write_result(store, 0, {"train": [[rows[0], rows[1]], rows[2:]]}, tmp_path)]
    results.append(write_result(store, 1, {"train": [[double]]}, tmp_path))
    [unread] = [s for s in results[0].shards if s.format == "parquet" and s.num_rows == 4]
    store.delete(unread.rows_path)
    assert count_duplicates_of_units(store, results, "parquet") == DuplicateCounts(1, 2)
    assert count_duplicates_of_units(store, [], "parquet") == DuplicateCounts(0, 0)
