"""Rollback: an old version's content is the latest again, and nothing else has changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlConfig
from etl.job import build_dataset
from shardmill.dataset.commit import publish
from shardmill.dataset.maintenance.child import child_of
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import collect_garbage
from shardmill.dataset.maintenance.retention import Retention
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.manifest import Operation
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.stores import open_store
from tests.etl.building import tree_for
from tests.lab.datasets import HERE, build_here, write_images


def config_of(image_size: int) -> EtlConfig:
    return EtlConfig(image_size=image_size, unit_min_images=6, formats=("parquet",), engine=HERE)


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Versions 1 and 2, of images of 8 and 9 pixels."""
    write_images(tmp_path / "images", num_images=24)
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), config_of(8))
    return build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), config_of(9))


def test_a_rollback_names_the_old_files_and_copies_nothing(root: str):
    before = {path for path in Path(root).rglob("*") if path.is_file()}
    done = roll_back(open_store(root), 1, "back")
    assert done.is_new
    latest, old = open_dataset(root), open_dataset(f"{root}@1")
    assert latest.manifest == done.manifest and latest.shards == old.shards
    lineage = (latest.pin.version, latest.manifest.operation, latest.manifest.parent_version)
    assert (*lineage, latest.manifest.restored_version) == (3, "rollback", 2, 1)
    assert latest.manifest.content_digest == old.manifest.content_digest
    assert latest.manifest.layout_digest == old.manifest.layout_digest
    new = {str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file() and path not in before}
    assert new == {"manifests/00000003.json", "committed/00000003.json"}
    for version in (1, 2, 3):
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()
    # The content is there already, and whatever follows is no rollback.
    again = roll_back(open_store(root), 1, "again")
    assert not again.is_new and again.manifest.version == 3
    assert compact_dataset(open_dataset(root), "compacting").manifest.restored_version is None


def test_the_next_build_follows_its_source_again(root: str, tmp_path: Path):
    roll_back(open_store(root), 1, "back")
    outcome = build_dataset(tree_for(tmp_path, "dataset", etl=config_of(8)), run_id="same")
    assert outcome.skipped and outcome.manifest.version == 3


def test_what_cannot_be_restored_is_refused(root: str):
    store = open_store(root)
    with pytest.raises(UsageError, match="has no version 7"):
        roll_back(store, 7, "back")
    open_shard = open_dataset(f"{root}@1").shards[0]
    data = store.read(open_shard.path)
    store.delete(open_shard.path)
    with pytest.raises(IntegrityError, match="is missing"):
        roll_back(store, 1, "back")
    store.put(open_shard.path, data)
    collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    with pytest.raises(UsageError, match="has expired"):
        roll_back(store, 1, "back")


def test_gc_keeps_what_a_rollback_names(root: str):
    store = open_store(root)
    roll_back(store, 1, "back")
    done = collect_garbage(store, Retention(keep=1, older_than_seconds=0.0), "gc")
    # Versions 1 and 3 name the same files, so they count as one.
    assert (done.expired, done.retained) == ((2,), (1, 3, 4))
    for version in done.retained:
        verify_dataset(open_dataset(f"{root}@{version}"), deep=True).raise_if_failed()


@pytest.mark.parametrize("operation", ["rollback", "compact", "expire"])
def test_a_version_that_claims_an_origin_must_hold_its_rows(root: str, operation: Operation):
    store = open_store(root)
    first, second = (open_dataset(f"{root}@{version}").manifest for version in (1, 2))
    forged = child_of(second, operation, "forged", content=first, restored_version=2)
    publish(store, forged)
    report = verify_dataset(open_dataset(root))
    assert [check.problem for check in report.problems] == [f"a {operation} of version 2 has different rows"]
