"""A shard format is one module and one registry entry: config, ETL, verification and reader need no other change."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etl.config import EtlTree
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.formats import SHARD_FORMATS
from shardmill.jobs.config import load_tree
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.registry import Entry
from tests.lab.datasets import make_dataset


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_an_added_format_works_from_config_to_batches(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = Entry("tests.shardmill.tar_format:TAR", "WebDataset; a chunk is a run of members")
    monkeypatch.setitem(SHARD_FORMATS.entries, "tar", entry)
    formats = load_tree(EtlTree, None, ("etl.formats=parquet,tar",)).etl.formats
    assert formats == ("parquet", "tar")

    dataset = open_dataset(make_dataset(tmp_path, num_images=60, formats=formats, encoding=encoding))
    verify_dataset(dataset, deep=True).raise_if_failed()
    plan = dataset.plan_epoch(dataset.plan_spec("train", seed=0, global_batch_size=8, num_streams=2), epoch=0)
    seen = []
    for name in formats:
        with read_batches(dataset, plan, options=ReaderOptions(format=name)) as batches:
            seen.append([(batch.images_NHWC, batch.labels_N, batch.sample_ids_N) for batch in batches])
    assert len(seen[0]) == plan.num_steps
    for ours, added in zip(*seen, strict=True):
        assert all(np.array_equal(one, other) for one, other in zip(ours, added, strict=True))
