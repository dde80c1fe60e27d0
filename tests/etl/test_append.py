"""Appending: images of several sources in one dataset, one after the other and at once; none is lost or doubled."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from etl.checks.version import version_warnings
from etl.config import EtlConfig, EtlTree
from etl.job import stage_record
from etl.later_runs import carry
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.index import read_shards, stored_sizes
from shardmill.dataset.row_segments import read_rows, rows_file
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import CommitConflict, RejectLimitExceeded, UsageError
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from tests.counting_store import BYTES_READ, CALLS, ENTRY, SCHEME
from tests.etl.appending import At, build
from tests.lab.datasets import write_images
from tests.lab.scale import usually
from tests.shardmill.collecting import gc_now

# More by these two: the drill of docs/etl.md is 5 and 10.
NUM_WRITERS = usually(3, 5)
NUM_ROUNDS = usually(1, 10)


def write_source(folder: Path, source: str, *, num_images: int = 15, image_size: int = 16) -> None:
    """Images with keys of their own; `union` has those of every source."""
    number = int.from_bytes(source.encode(), "big") % 1_000
    write_images(folder / "new", num_images=num_images, image_size=image_size, seed=number)
    for path in sorted((folder / "new").rglob("*.png")):
        for place in (source, "union"):
            target = folder / place / path.parent.name / f"{source}-{path.name}"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    shutil.rmtree(folder / "new")


def opened(folder: Path, dataset: str = "dataset") -> Dataset:
    return open_dataset(str(folder / dataset))


def check_equals_one_build_of_all(folder: Path, **etl: object) -> None:
    appended = opened(folder)
    whole = build(folder, "union", "whole", write_mode="overwrite", **etl).manifest
    assert appended.manifest.content_digest == whole.content_digest
    assert appended.manifest.counts == whole.counts
    assert appended.manifest.ledger_digest == whole.ledger_digest
    assert appended.manifest.channel_sums == whole.channel_sums
    verify_dataset(appended, deep=True).raise_if_failed()


def test_what_is_appended_equals_one_build_of_all_sources(tmp_path: Path):
    for source in ("monday", "tuesday", "wednesday"):
        write_source(tmp_path, source)
    for place in ("tuesday", "union"):
        (tmp_path / place / "class_0" / "broken.png").write_bytes(b"<html>not found</html>")
        shutil.copy2(tmp_path / "monday" / "class_0" / "monday-00000.png", tmp_path / place / "class_0" / "again.png")
    first = build(tmp_path, "monday").manifest
    before = {shard.path for shard in opened(tmp_path).shards}
    assert (first.operation, first.other_sources) == ("full", ())
    second = build(tmp_path, "tuesday")
    assert (second.num_images_read, second.manifest.operation, second.manifest.parent_version) == (17, "append", 1)
    third = build(tmp_path, "wednesday").manifest
    assert [Path(each.uri).name for each in (*third.other_sources, third.source)] == ["monday", "tuesday", "wednesday"]
    assert before < {shard.path for shard in opened(tmp_path).shards}
    check_equals_one_build_of_all(tmp_path)

    # Nothing of what is there is added again, though its files were touched.
    for path in (tmp_path / "monday").rglob("*.png"):
        os.utime(path, ns=(1, 1))
    for source in ("monday", "tuesday", "wednesday"):
        assert build(tmp_path, source).manifest.version == 3


def test_an_append_that_finds_nothing_new_says_so_and_reports_no_drift(tmp_path: Path):
    for source in ("monday", "tuesday"):
        write_source(tmp_path, source)
        build(tmp_path, source)
    seen = At("etl.nothing_new", lambda: None)
    outcome = build(tmp_path, "tuesday", run_id="again", observer=seen)
    assert (outcome.manifest.version, outcome.published) == (2, False)
    assert seen.events[-1] == "etl.nothing_new" and "etl.committed" not in seen.events
    assert stage_record(outcome, EtlTree(etl=EtlConfig(write_mode="append"))).sections["drift"] is None


def test_one_class_may_be_appended_and_says_nothing_of_the_others(tmp_path: Path):
    write_source(tmp_path, "a")
    write_source(tmp_path, "b")
    shutil.rmtree(tmp_path / "b" / "class_0")
    shutil.rmtree(tmp_path / "b" / "class_1")
    build(tmp_path, "a")
    quiet = At("", lambda: None)
    assert build(tmp_path, "b", observer=quiet, check_labels=lambda schema: None).manifest.counts.accepted == 20
    # Only of what the version holds in all.
    assert all(warning.startswith("the split ") and " has no image of " in warning for warning in quiet.warnings)


@pytest.mark.parametrize("duplicates", ["report", "drop"])
def test_the_order_of_appends_does_not_matter(tmp_path: Path, duplicates: str):
    for source in ("b", "a"):
        write_source(tmp_path, source)
    for place in ("a", "union"):
        shutil.copy2(tmp_path / "b" / "class_0" / "b-00000.png", tmp_path / place / "class_0" / "a-again.png")
    settings = {"duplicates": duplicates, "formats": ("parquet", "tfrecord")}
    for source in ("b", "a"):
        build(tmp_path, source, **settings)
    check_equals_one_build_of_all(tmp_path, **settings)


def test_duplicates_over_all_sources_are_refused_if_none_are_allowed(tmp_path: Path):
    write_source(tmp_path, "a")
    write_source(tmp_path, "b")
    shutil.copy2(tmp_path / "b" / "class_0" / "b-00000.png", tmp_path / "a" / "class_0" / "again.png")
    build(tmp_path, "b", duplicates="error")
    with pytest.raises(RejectLimitExceeded, match="again.png"):
        build(tmp_path, "a", duplicates="error")
    assert opened(tmp_path).pin.version == 1


def test_an_append_replaces_nothing(tmp_path: Path):
    write_source(tmp_path, "a")
    write_source(tmp_path, "b")
    build(tmp_path, "a")
    same_key = tmp_path / "b" / "class_0" / "a-00000.png"
    shutil.copy2(tmp_path / "b" / "class_0" / "b-00000.png", same_key)
    with pytest.raises(UsageError, match=r"class_0/a-00000.png is in the dataset with other bytes"):
        build(tmp_path, "b")
    same_key.write_bytes(b"no image")
    with pytest.raises(UsageError, match="class_0/a-00000.png is in the dataset, and is now rejected"):
        build(tmp_path, "b")
    with pytest.raises(UsageError, match="other pixels than those of version 1"):
        build(tmp_path, "b", image_size=8)
    assert opened(tmp_path).pin.version == 1


def test_to_overwrite_would_drop_the_other_sources_and_must_be_asked_for(tmp_path: Path):
    for source in ("a", "b"):
        write_source(tmp_path, source)
        build(tmp_path, source)
    for source, other in (("a", "b"), ("b", "a")):
        with pytest.raises(UsageError, match=f"also holds images of .*/{other};|was built from .*/{other}, not"):
            build(tmp_path, source, write_mode="overwrite")
    only = build(tmp_path, "a", write_mode="overwrite", replace_source=True).manifest
    alone = build(tmp_path, "a", "alone", write_mode="overwrite").manifest
    assert (only.content_digest, only.other_sources) == (alone.content_digest, ())
    # A dataset to which one source alone was appended is overwritten like any other.
    write_source(tmp_path, "a", num_images=18)
    (tmp_path / "a" / "class_1" / "a-00001.png").unlink()
    grown = build(tmp_path, "a", "alone", write_mode="overwrite")
    assert (grown.num_images_read, grown.manifest.counts.accepted) == (17, 17)


@pytest.mark.parametrize("has_new_classes", [False, True])
def test_an_append_that_loses_the_race_goes_behind_the_winner(tmp_path: Path, has_new_classes: bool):
    for source in ("a", "b", "c"):
        write_source(tmp_path, source)
        for place in (source, "union") if has_new_classes else ():
            (tmp_path / place / "class_2").rename(tmp_path / place / f"only_{source}")
    build(tmp_path, "a")
    rival = At("etl.changes", lambda: build(tmp_path, "b", run_id="rival"))
    outcome = build(tmp_path, "c", run_id="loser", observer=rival)
    assert (outcome.manifest.version, outcome.published, rival.events.count("etl.rebased")) == (3, True, 1)
    # A unit that was finished is written again only if a class of the winner has taken its class's number.
    assert ("etl.units_kept" in rival.events) is not has_new_classes
    check_equals_one_build_of_all(tmp_path)


def test_an_append_that_loses_the_first_version_takes_the_size_of_the_winner(tmp_path: Path):
    write_source(tmp_path, "a", image_size=64)
    write_source(tmp_path, "c", image_size=32)
    rival = At("etl.progress", lambda: build(tmp_path, "a", run_id="rival", image_size=0))
    outcome = build(tmp_path, "c", run_id="loser", observer=rival, image_size=0)
    # Its own images alone would have been stored at 32 pixels.
    assert (outcome.manifest.version, outcome.manifest.normalize.image_size) == (2, 64)
    assert outcome.manifest.counts.accepted == 30


def test_two_appends_of_one_source_at_once_add_it_once(tmp_path: Path):
    write_source(tmp_path, "a")
    write_source(tmp_path, "b")
    build(tmp_path, "a")
    rival = At("etl.changes", lambda: build(tmp_path, "b", run_id="rival"))
    outcome = build(tmp_path, "b", run_id="loser", observer=rival)
    assert (outcome.manifest.version, outcome.published) == (2, False)
    check_equals_one_build_of_all(tmp_path)


def test_one_that_overwrites_loses_to_an_append(tmp_path: Path):
    write_source(tmp_path, "a")
    write_source(tmp_path, "b")
    build(tmp_path, "a")
    write_source(tmp_path, "a", num_images=18)
    rival = At("etl.progress", lambda: build(tmp_path, "b", run_id="rival"))
    with pytest.raises(CommitConflict, match="by run rival"):
        build(tmp_path, "a", write_mode="overwrite", observer=rival)


def _append(folder: Path, writer: int, start: Barrier) -> None:
    for number in range(NUM_ROUNDS):
        start.wait()
        outcome = build(folder, f"source-{writer}-{number}", run_id=f"run-{writer}-{number}")
        assert outcome.published, "every append makes a version of its own"


@pytest.mark.starts("program")
def test_all_of_several_processes_that_append_at_once_succeed(tmp_path: Path):
    context = multiprocessing.get_context("fork")
    start = context.Barrier(NUM_WRITERS)
    for writer in range(NUM_WRITERS):
        for number in range(NUM_ROUNDS):
            write_source(tmp_path, f"source-{writer}-{number}", num_images=9)
    writers = [context.Process(target=_append, args=(tmp_path, n, start)) for n in range(NUM_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(300)
    assert [writer.exitcode for writer in writers] == [0] * NUM_WRITERS
    dataset = opened(tmp_path)
    versions = [open_dataset(f"{dataset.pin.uri}@{number + 1}").manifest for number in range(dataset.pin.version)]
    runs = {f"run-{writer}-{number}" for writer in range(NUM_WRITERS) for number in range(NUM_ROUNDS)}
    assert sorted(version.run_id for version in versions) == sorted(runs)
    assert [version.counts.accepted for version in versions] == [9 * number for number in range(1, len(runs) + 1)]
    check_equals_one_build_of_all(tmp_path)


_SOURCES = ("monday", "tuesday", "wednesday")


def test_an_append_reads_each_row_segment_once_and_lists_the_versions_once(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    for source in _SOURCES:
        write_source(tmp_path, source)
        BYTES_READ.clear()
        CALLS.clear()
        build(tmp_path, source, dataset_uri=f"{SCHEME}://{tmp_path}/dataset")
    files = [rows_file(shard) for shard in opened(tmp_path).shards]
    assert {file.path: BYTES_READ[file.path] for file in files} == {file.path: file.size_bytes for file in files}
    # Manifests and their records, shards, leases, and pending records before and behind the units.
    assert CALLS["list"] <= 6


def _ids(dataset: Dataset, split: str) -> list[int]:
    tables = (read_rows(dataset.store, shard, dataset.manifest.row_schema) for shard in dataset.shards_of(split))
    return [each for table in tables for each in table.column("sample_id").to_pylist()]


def test_small_shards_are_merged_in_their_order_and_earlier_versions_keep_theirs(tmp_path: Path, monkeypatch):
    for source in _SOURCES:
        write_source(tmp_path, source)
        build(tmp_path, source, "unmerged")
    monkeypatch.setattr(carry, "_MIN_MERGED", 2)
    for source in _SOURCES:
        build(tmp_path, source)
    merged, unmerged = opened(tmp_path), opened(tmp_path, "unmerged")
    assert len(merged.shards) < len(unmerged.shards)
    for split in merged.manifest.splits:
        assert _ids(merged, split) == _ids(unmerged, split)
    check_equals_one_build_of_all(tmp_path)
    for version in range(1, len(_SOURCES) + 1):
        verify_dataset(open_dataset(f"{tmp_path}/dataset@{version}"), deep=True).raise_if_failed()
    assert gc_now(str(tmp_path / "dataset"), 1).garbage
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_shards_grow_with_the_logarithm_of_appends_and_rows_are_copied_as_often():
    rng, sizes, num_added, num_copied, most = random.Random(0), [1_000], 0, 0, 0
    for _ in range(2_000):
        first = carry.first_to_merge(sizes, 10**9)
        if first < len(sizes):
            num_copied += sum(sizes[first:])
            sizes[first:] = [sum(sizes[first:])]
        sizes.append(rng.randint(50, 150))
        num_added += sizes[-1]
        most = max(most, len(sizes))
    assert most <= 20 and num_copied <= 10 * num_added
    # Large shards stay as they are, and so does a few.
    assert carry.first_to_merge([5] * 100, 20) == 100 and carry.first_to_merge([5] * 5, 100) == 5


def test_files_of_other_versions_are_listed_only_as_far_as_that_is_cheaper(tmp_path: Path):
    class Counting(LocalStore):
        num_listed = 0

        def list(self, prefix: str):
            for file in super().list(prefix):
                self.num_listed += 1
                yield file

    write_source(tmp_path, "monday")
    build(tmp_path, "monday")
    dataset, store = opened(tmp_path), Counting(str(tmp_path / "dataset"))
    files = [rows_file(shard) for shard in read_shards(store, dataset.manifest)]
    for number in range(500):
        (tmp_path / "dataset" / "rows" / f"{number}.parquet").touch()
    lost, *present = files
    (tmp_path / "dataset" / lost.path).unlink()
    assert stored_sizes(store, files) == {file.path: file.size_bytes for file in present}
    assert store.num_listed <= 20 * len(files) < 500


def test_a_version_of_very_many_small_shards_names_compact(tmp_path: Path):
    write_source(tmp_path, "monday")
    manifest = build(tmp_path, "monday").manifest

    def told(operation: str, num_shards: int) -> bool:
        splits = {name: each.model_copy(update={"num_shards": num_shards}) for name, each in manifest.splits.items()}
        version = manifest.model_copy(update={"splits": splits, "operation": operation})
        return any("shardmill compact" in each for each in version_warnings(opened(tmp_path).store, version))

    assert told("append", 100) and not told("append", 60) and not told("full", 100)
