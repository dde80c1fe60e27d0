"""Number of requests to a store: an unchanged run requests no shard by name, for any number of shards."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.dataset.open import open_dataset
from shardmill.dataset.rules import verify_present
from shardmill.dataset.verify import verify_dataset
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import read_samples
from shardmill.stores import STORES
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.lab.datasets import HERE, build_here, write_images


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset of many small shards behind a counting store."""
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    write_images(tmp_path / "images", num_images=58)
    config = EtlConfig(image_size=8, unit_min_images=1, formats=("parquet",))
    return build_here(str(tmp_path / "images"), f"{SCHEME}://{tmp_path}/dataset", config)


def test_an_unchanged_run_asks_for_no_shard_by_name(uri: str, tmp_path: Path):
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "images")),
        dataset=DatasetConfig(uri=uri),
        etl=EtlConfig(image_size=8, unit_min_images=1, formats=("parquet",), engine=HERE),
    )
    num_shards = len(open_dataset(uri).shards)
    assert num_shards > 40

    # `build_here` writes no dataset card, and a run writes a missing one.
    assert build_dataset(tree, run_id="card").skipped
    CALLS.clear()
    assert build_dataset(tree, run_id="again").skipped
    assert CALLS["list"] <= 10 and CALLS["stat"] + CALLS["read"] + CALLS["read_range"] <= 10, CALLS
    assert not CALLS["put"] + CALLS["put_if_absent"] + CALLS["delete"]

    # The rules need the rows, so each shard's row segment is read: one request for each, none for its size.
    CALLS.clear()
    verify_dataset(open_dataset(uri)).raise_if_failed()
    assert CALLS["list"] <= 10 and CALLS["stat"] == 0
    assert CALLS["read"] + CALLS["read_range"] <= num_shards + 10, CALLS

    # What a training asks before it starts.
    CALLS.clear()
    verify_present(open_dataset(uri))
    assert CALLS.total() <= 10, CALLS


def test_reading_a_shard_takes_a_request_for_its_footer_and_one_for_each_chunk(uri: str):
    dataset = open_dataset(uri)
    index = dataset.index("train")
    CALLS.clear()
    assert len(read_samples(dataset, "train", 1000)) == dataset.manifest.splits["train"].num_rows
    assert {"read_range": index.num_shards + index.num_chunks} == CALLS
