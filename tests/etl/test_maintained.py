"""Builds over a dataset that was compacted, rolled back or collected in between: equal to a full one, always."""

from __future__ import annotations

import shutil
from pathlib import Path

from etl.config import EtlConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import collect_garbage
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.stores import open_store
from tests.etl.building import tree_for
from tests.lab.datasets import HERE, write_images

_CONFIG = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=8, formats=("parquet", "tfrecord"))


def build(folder: Path) -> BuildOutcome:
    """An incremental build, compared with a full one of the same images."""
    outcome = build_dataset(tree_for(folder, "dataset", etl=_CONFIG), run_id="test")
    shutil.rmtree(folder / "full", ignore_errors=True)
    full = build_dataset(tree_for(folder, "full", etl=_CONFIG), run_id="test")
    assert outcome.manifest.content_digest == full.manifest.content_digest
    return outcome


def test_a_build_continues_from_whatever_maintenance_has_left(tmp_path: Path):
    root, store = str(tmp_path / "dataset"), open_store(tmp_path / "dataset")
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path)

    # Compacted: only what was added is read.
    compact_dataset(open_dataset(root), "compacting")
    write_images(tmp_path / "images", num_images=33)
    grown = build(tmp_path)
    assert (grown.manifest.version, grown.manifest.parent_version) == (3, 2)

    # Rolled back to before they were added: they are added again.
    roll_back(store, 2, "back")
    assert open_dataset(root).manifest.counts.accepted == 30
    assert build(tmp_path).manifest.counts.accepted == 33

    # Collected: the shards that the new version carries are whole, and what has expired stays so.
    collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    (tmp_path / "images" / "class_0" / "00003.png").unlink()
    shrunk = build(tmp_path)
    assert shrunk.num_images_read == 0 and shrunk.manifest.counts.accepted == 32
    assert shrunk.manifest.has_expired(1) and not shrunk.manifest.has_expired(5)
    collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    verify_dataset(open_dataset(root), deep=True).raise_if_failed()
