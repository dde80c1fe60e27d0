"""Rows read back from shards: all that was published of them, so that equal shards and sums come of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.dataset.copy_rows import read_stored_rows
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_dataset
from shardmill.dataset.row_segments import ROWS_SCHEMA
from shardmill.dataset.segment import read_segment, rows_file
from shardmill.dataset.shard import publish_shard
from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.cutting import cut_chunks
from shardmill.ids import add_digests, format_digest
from shardmill.stores import open_store
from shardmill.values import ShardInfo
from tests.lab.datasets import make_dataset


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return open_dataset(make_dataset(tmp_path_factory.mktemp("whole"), num_images=60))


def shard_of(dataset: Dataset, format_name: str) -> ShardInfo:
    return dataset.shards_of("train", format_name)[0]


@pytest.mark.parametrize("source_format", SHARD_FORMATS)
@pytest.mark.parametrize("target_format", SHARD_FORMATS)
def test_a_copied_shard_equals_the_one_that_the_etl_published(
    whole: Dataset, tmp_path: Path, source_format: str, target_format: str
):
    schema = whole.manifest.row_schema
    rows = read_stored_rows(whole.store, shard_of(whole, source_format), schema)
    chunks = list(cut_chunks(rows, whole.manifest.config["chunk_bytes"]))
    copied = publish_shard(open_store(tmp_path / "copy"), "train", "copied", target_format, chunks, schema=schema)
    expected = shard_of(whole, target_format)
    # The whole file and the whole row segment, byte for byte; only the names are other ones.
    assert replace(copied, path=expected.path, rows_path=expected.rows_path) == expected


def test_the_sums_of_the_manifest_follow_from_the_copied_rows(whole: Dataset):
    for split, info in whole.manifest.splits.items():
        rows = [
            row
            for shard in whole.shards_of(split)
            for row in read_stored_rows(whole.store, shard, whole.manifest.row_schema)
        ]
        assert len(rows) == info.num_rows
        total = format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows)))
        assert total == info.row_digest_sum


@pytest.mark.parametrize("format_name", SHARD_FORMATS)
def test_a_row_segment_of_another_shard_is_refused(whole: Dataset, format_name: str):
    first, second = whole.shards_of("train", format_name)[:2]
    rows = read_segment(whole.store, rows_file(second), ROWS_SCHEMA, second.num_rows)
    assert len(rows) == second.num_rows
    mixed = replace(
        first,
        rows_path=second.rows_path,
        rows_bytes=second.rows_bytes,
        rows_sha256=second.rows_sha256,
        num_rows=second.num_rows,
    )
    with pytest.raises(IntegrityError, match="a different row than its row segment"):
        list(read_stored_rows(whole.store, mixed, whole.manifest.row_schema))
