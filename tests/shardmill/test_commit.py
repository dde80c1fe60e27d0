"""A commit of a version, and of one that a rollback makes: all or nothing, and only by its writer."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build
from etl.units.results import Finished
from etl.units.write_unit import write_unit
from shardmill.checksummed import checksum_file, read_checksummed, verified_body, verify_file, with_checksum
from shardmill.dataset.commit import commit_version, publish
from shardmill.dataset.dataset import Dataset, open_dataset, open_pinned
from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.ledger import RejectionLog
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.manifest import Manifest, Operation, VersionRange, child_of, manifest_path
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import check_recorded, latest_version, read_manifest
from shardmill.errors import CommitConflict, IntegrityError, SecurityRefusal, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.reader import read_batches
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from shardmill.values import Batch
from tests.etl.building import tree_for
from tests.lab.datasets import HERE, build_here, make_dataset, write_images

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


@pytest.mark.starts("program")
def test_of_eight_racing_processes_exactly_one_wins_each_of_a_hundred_rounds(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=30, formats=("parquet",))
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(_NUM_WRITERS), context.Queue()
    writers = [context.Process(target=_race, args=(root, n, start, results)) for n in range(_NUM_WRITERS)]
    for writer in writers:
        writer.start()
    outcomes = [results.get(timeout=300) for _ in range(_NUM_WRITERS * _NUM_ROUNDS)]
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
        etl=EtlConfig(**{"image_size": 16, "unit_min_images": 40, **etl}),
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


def test_another_content_under_the_number_is_a_conflict_that_names_both_runs(tmp_path: Path):
    draft, store = _draft(tmp_path), open_store(tmp_path / "dataset")
    winner = publish(
        store, draft.model_copy(update={"commit_id": "another", "run_id": "w", "content_digest": "1" * 64})
    )
    with pytest.raises(CommitConflict, match=r"version 2 was committed by run w while run r worked"):
        publish(store, draft)
    assert read_manifest(store, 2) == winner and check_recorded(store, 2)


def test_an_interrupted_request_is_sent_again_before_the_commit_is_given_up(tmp_path: Path, monkeypatch):
    """It may be on its way, and arrive after `gc` has deleted what it names."""
    draft, store, sent = _draft(tmp_path), open_store(tmp_path / "dataset"), list[str]()

    def interrupted_once(self: LocalStore, path: str, data: bytes, put=LocalStore.put_if_absent) -> bool:
        sent.append(path)
        if len(sent) == 1:
            raise KeyboardInterrupt
        return put(self, path, data)

    monkeypatch.setattr(LocalStore, "put_if_absent", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        publish(store, draft)
    assert sent == [manifest_path(2)] * 2 and read_manifest(store, 2) == draft


class _Ended(BaseException):
    """In the place of a kill, or of a lease that has lapsed."""


@pytest.mark.parametrize(
    ("point", "is_published", "is_recorded"),
    [("lease", False, False), ("manifest_put", False, False), ("post_commit", True, False), ("", True, True)],
)
def test_the_order_of_a_commit(tmp_path: Path, monkeypatch, point: str, is_published: bool, is_recorded: bool):
    """First the lease is checked, then the manifest appears, and last it is recorded."""

    def end(*_: object) -> None:
        raise _Ended

    checked: list[bool] = []
    draft, store = _draft(tmp_path), open_store(tmp_path / "dataset")
    if point not in ("", "lease"):
        monkeypatch.setenv(VARIABLE, point)
    monkeypatch.setattr(os, "kill", end)
    with pytest.raises(_Ended) if point else nullcontext():
        publish(store, draft, end if point == "lease" else lambda: checked.append(True))
    assert checked == ([] if point == "lease" else [True])
    assert (store.stat(manifest_path(2)) is not None) == is_published
    assert (store.stat("committed/00000002.json") is not None) == is_recorded


def test_a_build_remembers_what_had_expired(tmp_path: Path):
    root = make_dataset(tmp_path, num_images=30, formats=("parquet",))
    store, expired = open_store(root), (VersionRange(first=1, last=1),)
    first = read_manifest(store, 1)
    publish(store, first.model_copy(update={"version": 2, "parent_version": 1, "expired_versions": expired}))
    build_here(str(tmp_path / "images"), root, EtlConfig(image_size=8, formats=("parquet",)))
    assert read_manifest(store, 3).expired_versions == expired


def _draft(tmp_path: Path) -> Manifest:
    root = make_dataset(tmp_path, num_images=30)
    return read_manifest(open_store(root), 1).model_copy(update={"version": 2, "commit_id": "mine", "run_id": "r"})


def test_a_build_that_equals_its_parent_makes_no_version(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_for(tmp_path)
    results = [write_unit(unit, plan.task) for unit in plan.units]
    assert commit_results(plan, Finished(plan.listing, results)).version == 1
    record = tmp_path / "dataset" / "committed" / "00000001.json"
    record.unlink()
    again = plan_for(tmp_path)
    assert commit_results(again, Finished(again.listing, results)).version == 1
    assert open_dataset(str(tmp_path / "dataset")).manifest.version == 1
    assert record.exists()
    # Another source of equal content is another version, and so is one whose parent has lost a file.
    moved = again.build.source.model_copy(update={"uri": "elsewhere"})
    elsewhere = dataclasses.replace(again.build, source=moved)
    log, counts = RejectionLog(tmp_path), DuplicateCounts(0, 0, 0)
    committed = commit_version(again.store, elsewhere, results, log, counts, again.parent)
    assert (committed.version, committed.source) == (2, moved)
    (tmp_path / "dataset" / results[0].shards[0].path).unlink()
    assert commit_version(again.store, elsewhere, results, log, counts, committed).version == 3


def test_a_version_counts_its_rows_whatever_the_order_in_which_units_ended(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_for(tmp_path, formats=("parquet",), unit_min_images=10)
    results = [write_unit(unit, plan.task) for unit in plan.units]
    assert len(results) > 2
    first, second = (
        commit_version(plan.store, plan.build, each, RejectionLog(tmp_path), DuplicateCounts(3, 2, 1), None)
        for each in (results, results[::-1])
    )
    # The second finds the first, whose content is equal.
    assert first == second and list(first.splits) == sorted(first.splits)
    counts = first.counts
    assert (counts.listed, counts.accepted, counts.rejected, counts.by_reason) == (60, 60, 0, {})
    assert (counts.duplicate_content, counts.conflicting_label, counts.leaked_content) == (3, 2, 1)
    parts = [part for result in results for part in result.splits]
    for name, info in first.splits.items():
        of_split = [part for part in parts if part.split == name]
        shards = [shard for result in results for shard in result.shards if shard.split == name]
        assert counts.by_split[name] == info.num_rows == sum(part.num_rows for part in of_split)
        assert info.image_bytes == sum(part.image_bytes for part in of_split)
        assert info.num_shards == len(shards) and info.num_chunks == sum(len(shard.chunks) for shard in shards)
        assert info.class_counts == tuple(map(sum, zip(*(part.class_counts for part in of_split), strict=True)))
    train = [part for part in parts if part.split == "train"]
    assert first.channel_sums.num_pixels == sum(part.num_pixels for part in train)
    assert first.channel_sums.square_sums == tuple(
        map(sum, zip(*(part.channel_square_sums for part in train), strict=True))
    )
    assert first.channel_sums.sums == tuple(map(sum, zip(*(part.channel_sums for part in train), strict=True)))


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
    said = (
        "inputs are not the listed ones" if fault == "swapped" else f"{plan.build.num_listed} inputs were listed, but"
    )
    with pytest.raises(IntegrityError, match=said):
        commit_version(plan.store, plan.build, wrong, RejectionLog(tmp_path), DuplicateCounts(0, 0, 0), None)
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


@pytest.mark.starts("program")
def test_an_epoch_read_while_another_process_commits_is_of_exactly_one_version(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    root, last, seen = str(tmp_path / "dataset"), 12, []
    # It waits there until a version has been read: else a machine may commit them all before it reads one.
    waits = [4, 8]
    command = [sys.executable, "-m", "tests.programs.commit_versions", tmp_path, str(last), *map(str, waits)]
    writer = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, bufsize=0)
    assert writer.stdin is not None
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
            if waits and version >= waits[0]:
                writer.stdin.write(b"\n")
                del waits[0]
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


def test_an_envelope_is_json_and_opens_again():
    body = b'{"accuracy": 0.5}'
    envelope = with_checksum(body)
    assert json.loads(envelope)["body"] == {"accuracy": 0.5}
    assert verified_body(envelope, "here") == body


def test_every_flipped_bit_and_every_cut_of_an_envelope_is_noticed():
    envelope = with_checksum(b'{"accuracy": 0.3667}')
    damaged = [
        envelope[:place] + bytes([envelope[place] ^ (1 << bit)]) + envelope[place + 1 :]
        for place in range(len(envelope))
        for bit in range(8)
    ]
    damaged += [envelope[:length] for length in range(len(envelope))] + [envelope + b" "]
    for data in damaged:
        with pytest.raises(IntegrityError, match="here was altered; .*; restore it"):
            verified_body(data, "here", fix="restore it")


def test_a_checksummed_file_is_read_only_as_it_was(tmp_path: Path):
    store = open_store(tmp_path)
    store.put("models/a.bin", b"weights")
    file = checksum_file("a.bin", b"weights")
    assert read_checksummed(store, file, "models") == b"weights"
    verify_file(store, file, "models")
    for look in (read_checksummed, verify_file):
        for wrong in (replace(file, sha256="0" * 64), replace(file, size_bytes=1 << 50), replace(file, size_bytes=0)):
            with pytest.raises(IntegrityError, match="altered"):
                look(store, wrong, "models")
        with pytest.raises(IntegrityError, match=r"b\.bin is missing"):
            look(store, replace(file, path="b.bin"), "models")
        with pytest.raises(SecurityRefusal):
            look(store, replace(file, path="../models/a.bin"), "models")


def test_a_file_is_checked_in_blocks(tmp_path: Path):
    store, block = open_store(tmp_path), 8_000_000
    for size in (0, 1, block - 1, block, block + 1, 2 * block, 2 * block + 9):
        data = os.urandom(size)
        store.put("file", data)
        verify_file(store, checksum_file("file", data))
        if size:
            store.put("file", data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(IntegrityError, match="altered"):
                verify_file(store, checksum_file("file", data))
