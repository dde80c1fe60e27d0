"""Compaction: fewer shards, the same rows to the last byte, and the versions before it as they were."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from etl.config import EtlConfig
from etl.job import build_dataset
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.shard import read_stored_rows
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import CommitConflict, IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.rows import StoredRow
from tests.etl.building import tree_for
from tests.lab.datasets import HERE, build_here, write_images

_SEED = random.SystemRandom().randrange(2**32)


def many_small_shards(folder: Path, **etl: object) -> str:
    write_images(folder / "images", num_images=60)
    config = EtlConfig(
        **{"image_size": 16, "encoding": "png", "unit_min_images": 8, "chunk_bytes": 4_000,
           "formats": tuple(SHARD_FORMATS), **etl}
    )  # fmt: skip
    return build_here(str(folder / "images"), str(folder / "dataset"), config)


def rows_of(dataset: Dataset, format_name: str) -> dict[str, list[StoredRow]]:
    schema = dataset.manifest.row_schema
    return {
        split: sorted(
            (row for shard in dataset.shards_of(split, format_name)
             for row in read_stored_rows(dataset.store, shard, schema)),
            key=lambda row: row.source.key,
        )
        for split in dataset.manifest.splits
    }  # fmt: skip


@pytest.mark.parametrize("shard_max_bytes", [6_000, 30_000, 128_000_000])
def test_a_compacted_version_holds_the_same_rows_in_fewer_shards(tmp_path: Path, shard_max_bytes: int):
    root = many_small_shards(tmp_path, shard_max_bytes=shard_max_bytes)
    before = open_dataset(root)
    done = compact_dataset(before, "compacting")
    after = open_dataset(root)
    assert done.num_shards_after < done.num_shards_before
    assert done.num_shards_after == sum(split.num_shards for split in after.manifest.splits.values())
    assert after.manifest == done.manifest
    assert (after.manifest.operation, after.manifest.parent_version, after.pin.version) == ("compact", 1, 2)
    assert after.manifest.content_digest == before.manifest.content_digest
    assert after.manifest.counts == before.manifest.counts
    for format_name in SHARD_FORMATS:
        assert rows_of(after, format_name) == rows_of(before, format_name)
    for version in (1, 2):
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


def test_images_of_different_sizes_are_copied_as_they_are(tmp_path: Path):
    write_images(tmp_path / "images" / "sub", num_images=30, image_size=40, seed=1)
    root = many_small_shards(tmp_path, resize_mode="none")
    before = open_dataset(root)
    compact_dataset(before, "compacting")
    after = open_dataset(root)
    assert len({row.sample.height for row in rows_of(after, "parquet")["train"]}) == 2
    assert rows_of(after, "tfrecord") == rows_of(before, "parquet")
    verify_dataset(after, deep=True).raise_if_failed()


def test_what_is_compact_already_makes_no_version(tmp_path: Path):
    root = many_small_shards(tmp_path)
    compact_dataset(open_dataset(root), "first")
    again = compact_dataset(open_dataset(root), "second")
    assert again.is_unchanged and again.manifest.version == open_dataset(root).pin.version == 2
    # Full shards are named again, not copied.
    full = many_small_shards(tmp_path / "full", shard_max_bytes=1, formats=("parquet",))
    assert compact_dataset(open_dataset(full), "third").is_unchanged


def test_the_etl_finds_its_images_in_a_compacted_version(tmp_path: Path):
    config = EtlConfig(image_size=16, encoding="png", unit_min_images=8, formats=("parquet",), engine=HERE)
    write_images(tmp_path / "images", num_images=120)
    root = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), config)
    assert not compact_dataset(open_dataset(root), "compacting").is_unchanged
    outcome = build_dataset(tree_for(tmp_path, "dataset", etl=config), run_id="again")
    assert outcome.skipped and outcome.manifest.version == 2


@pytest.mark.parametrize("folder", ["shards", "rows"])
def test_an_altered_byte_ends_a_compaction_without_a_version(tmp_path: Path, folder: str):
    print(f"seed {_SEED}")
    root = many_small_shards(tmp_path, formats=("tfrecord",))
    file = random.Random(_SEED).choice([path for path in Path(root, folder).rglob("*") if path.is_file()])
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(IntegrityError, match=file.name):
        compact_dataset(open_dataset(root), "compacting")
    assert open_dataset(root).pin.version == 1


def test_another_commit_meanwhile_is_a_conflict(tmp_path: Path):
    root = many_small_shards(tmp_path, formats=("parquet",))
    before = open_dataset(root)
    build_here(str(tmp_path / "images"), root, EtlConfig(image_size=8))
    with pytest.raises(CommitConflict):
        compact_dataset(before, "compacting")
    assert open_dataset(root).manifest.operation == "full"
