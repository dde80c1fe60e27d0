"""The commit: one winner among racing writers, equal content is no conflict, nothing uncounted gets through."""

from __future__ import annotations

import dataclasses
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.plan import BuildPlan, plan_build
from etl.units.finished import Finished
from etl.units.write_unit import write_unit
from shardmill.dataset.commit import commit_version, publish
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.manifest import Manifest, manifest_path
from shardmill.dataset.open import open_dataset, open_pinned
from shardmill.dataset.rejection_log import RejectionLog
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version, read_manifest
from shardmill.errors import CommitConflict, IntegrityError
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.reader import read_batches
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import Batch
from tests.lab.datasets import build_here, make_dataset, write_images

ROOT = Path(__file__).parents[2]
_NUM_WRITERS, _NUM_ROUNDS = 8, 100


def _race(root: str, writer: int, start, results) -> None:
    """Commit once a round, in lock step with the other writers; each writer's manifest has content of its own."""
    store = open_store(root)
    first = read_manifest(store, 1)
    for round_number in range(_NUM_ROUNDS):
        version = round_number + 2
        draft = first.model_copy(
            update={"version": version, "commit_id": f"{writer}-{version}", "run_id": f"writer{writer}",
                    "parent_version": version - 1, "content_digest": f"{writer * 1000 + version:064x}"}
        )  # fmt: skip
        start.wait()
        try:
            publish(store, draft)
            results.put((version, writer, "won"))
        except CommitConflict as conflict:
            results.put((version, writer, str(conflict)))
        start.wait()


def test_of_eight_racing_processes_exactly_one_wins_each_of_a_hundred_rounds(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=30, formats=("parquet",))
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(_NUM_WRITERS), context.Queue()
    writers = [context.Process(target=_race, args=(root, n, start, results)) for n in range(_NUM_WRITERS)]
    for writer in writers:
        writer.start()
    outcomes = [results.get(timeout=120) for _ in range(_NUM_WRITERS * _NUM_ROUNDS)]
    for writer in writers:
        writer.join(60)
    store = open_store(root)
    for version in range(2, _NUM_ROUNDS + 2):
        mine = {writer: outcome for seen, writer, outcome in outcomes if seen == version}
        winners = [writer for writer, outcome in mine.items() if outcome == "won"]
        assert len(winners) == 1
        assert read_manifest(store, version).run_id == f"writer{winners[0]}"
        assert all(f"by run writer{winners[0]}" in outcome for n, outcome in mine.items() if n != winners[0])


def plan_for(tmp_path: Path, **etl: object) -> BuildPlan:
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "images")),
        dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
        etl=EtlConfig(image_size=16, unit_min_images=40, **etl),
    )
    return plan_build(tree, run_id="test")


def test_a_writer_whose_reply_was_lost_recognises_its_own_commit(tmp_path: Path):
    draft = _draft(tmp_path)
    store = open_store(tmp_path / "dataset")
    assert publish(store, draft) == draft
    assert publish(store, draft) == draft


def test_a_loser_with_equal_content_takes_the_winner(tmp_path: Path):
    draft = _draft(tmp_path)
    store = open_store(tmp_path / "dataset")
    winner = publish(store, draft)
    assert publish(store, draft.model_copy(update={"commit_id": "another", "run_id": "later"})) == winner


def _draft(tmp_path: Path) -> Manifest:
    root = make_dataset(tmp_path, num_images=30)
    return read_manifest(open_store(root), 1).model_copy(update={"version": 2, "commit_id": "mine", "run_id": "r"})


def test_a_build_that_equals_its_parent_makes_no_version(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_for(tmp_path)
    results = [write_unit(unit, plan.task) for unit in plan.units]
    assert commit_results(plan, Finished(plan.listing, results)).version == 1
    again = plan_for(tmp_path)
    assert commit_results(again, Finished(again.listing, results)).version == 1
    assert open_dataset(str(tmp_path / "dataset")).manifest.version == 1


def test_another_config_makes_a_child_version(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=60)
    before = open_dataset(root)
    build_here(str(tmp_path / "images"), root, EtlConfig(image_size=8, unit_min_images=40))
    after = open_dataset(root)
    assert (after.manifest.version, after.manifest.parent_version) == (2, 1)
    assert open_dataset(f"{root}@1").manifest == before.manifest
    assert after.manifest.content_digest != before.manifest.content_digest
    verify_dataset(open_dataset(f"{root}@1"), deep=True).raise_if_failed()


@pytest.mark.parametrize("fault", ["lost", "doubled", "swapped"])
def test_results_that_do_not_add_up_are_not_committed(tmp_path: Path, fault: str):
    write_images(tmp_path / "images", num_images=120)
    plan = plan_for(tmp_path)
    results = [write_unit(unit, plan.task) for unit in plan.units]
    assert len(results) > 2
    wrong = {
        "lost": results[1:],
        "doubled": [*results, results[0]],
        "swapped": [dataclasses.replace(results[0], accepted_key_sum=results[1].accepted_key_sum), *results[1:]],
    }[fault]
    with pytest.raises(IntegrityError, match="listed"):
        commit_version(plan.store, plan.build, wrong, RejectionLog(tmp_path), DuplicateCounts(0, 0, 0), 0)
    assert plan.store.stat(manifest_path(1)) is None


def test_files_of_lost_attempts_are_never_read(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_for(tmp_path)
    for unit in plan.units:
        write_unit(unit, plan.task)
    commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
    dataset = open_dataset(str(tmp_path / "dataset"))
    on_disk = list((tmp_path / "dataset" / "shards").rglob("*.parquet"))
    assert len(on_disk) == 2 * len(dataset.shards)
    verify_dataset(dataset, deep=True).raise_if_failed()


def read_epoch(dataset: Dataset) -> list[Batch]:
    plan = dataset.plan_epoch(dataset.plan_spec("train", seed=0, global_batch_size=16, num_streams=4), epoch=0)
    with read_batches(dataset, plan) as batches:
        return list(batches)


def test_an_epoch_read_while_another_process_commits_is_of_exactly_one_version(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    root, last, seen = str(tmp_path / "dataset"), 12, []
    writer = subprocess.Popen([sys.executable, "-m", "tests.programs.commit_versions", tmp_path, str(last)], cwd=ROOT)
    try:
        while not seen or seen[-1] < last:
            assert writer.poll() in (None, 0)
            if latest_version(open_store(root)) == 0:
                time.sleep(0.01)
                continue
            dataset = open_dataset(root)
            version = dataset.manifest.version
            batches = read_epoch(dataset)
            assert {batch.images_NHWC.shape[1:] for batch in batches} == {(7 + version, 7 + version, 3)}
            ids = np.concatenate([batch.sample_ids_N[batch.weights_N > 0] for batch in batches])
            assert len(ids) == len(set(ids.tolist())) == dataset.manifest.splits["train"].num_rows
            assert open_pinned(dataset.pin).manifest == dataset.manifest
            seen.append(version)
    finally:
        writer.kill()
        writer.wait()
    # It did look while versions appeared.
    assert seen == sorted(seen) and len(set(seen)) >= 3


def test_a_store_counts_as_uncommitted_until_the_manifest_is_there(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20)
    plan = plan_for(tmp_path)
    for unit in plan.units:
        write_unit(unit, plan.task)
    assert isinstance(plan.store, LocalStore)
    with pytest.raises(IntegrityError, match="not a committed dataset.*shardmill etl"):
        open_dataset(str(tmp_path / "dataset"))


def test_an_index_in_several_segments_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = make_dataset(tmp_path, num_images=60)
    whole = open_dataset(root)
    monkeypatch.setattr("shardmill.dataset.index.SEGMENT_CHUNKS", 2)
    other = build_here(str(tmp_path / "images"), str(tmp_path / "other"), EtlConfig(**whole.manifest.config))
    cut = open_dataset(other)
    assert len(cut.manifest.index_segments) > len(whole.manifest.index_segments) == 1
    assert cut.manifest.layout_digest == whole.manifest.layout_digest
    assert [(each.split, each.format, each.num_rows) for each in cut.shards] == [
        (each.split, each.format, each.num_rows) for each in whole.shards
    ]
    verify_dataset(cut, deep=True).raise_if_failed()
