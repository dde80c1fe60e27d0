"""Pending records: believed only as they were written, with every byte they speak for; gone when nobody needs them."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build
from etl.units.results import (
    Finished,
    clear_pending,
    finished_units,
    keep_result,
    kept_result,
    kept_results,
    pending_path,
)
from etl.units.units import WorkUnit
from etl.units.write_unit import write_unit
from shardmill.dataset.build import PENDING, UnitResult
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import RejectLimitExceeded
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from shardmill.values import ANNOTATION_REASONS, TRANSIENT_REASONS, RejectReason, SourceImage
from tests.lab.datasets import HERE, write_images
from tests.services.faulty_store import FaultyStore

_SEED = random.SystemRandom().randrange(2**32)
_ETL = EtlConfig(
    engine=HERE, image_size=16, encoding="png", unit_min_images=20, formats=("parquet",), chunk_bytes=4_000
)


def tree_for(folder: Path, etl: EtlConfig = _ETL) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=str(folder / "images")), dataset=DatasetConfig(uri=str(folder / "dataset")), etl=etl
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", num_images=60)
    return tmp_path


def finish(plan: BuildPlan) -> None:
    """Run every unit, and be killed before the commit."""
    for unit in plan.units:
        write_unit(unit, plan.task)


def missing_units(plan: BuildPlan) -> list[WorkUnit]:
    """Those that have to run, in order."""
    kept = {result.unit_index for result in kept_results(plan.store, plan.units)}
    return [unit for unit in plan.units if unit.index not in kept]


def pending(folder: Path) -> list[str]:
    return [file.path for file in open_store(folder / "dataset").list(PENDING)]


def test_whatever_byte_of_a_record_is_altered_its_unit_runs_again(folder: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    plan = plan_build(tree_for(folder), run_id="a")
    finish(plan)
    assert missing_units(plan) == []
    file = folder / "dataset" / pending_path(plan.units[0])
    whole = file.read_bytes()
    for _ in range(150):
        data = bytearray(whole)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        assert missing_units(plan) == [plan.units[0]]
    for data in (b"", whole[:-1], b"[" * 100_000):
        file.write_bytes(data)
        assert missing_units(plan) == [plan.units[0]]
    # Another unit's record under this unit's name is whole, and not the one.
    shutil.copy(folder / "dataset" / pending_path(plan.units[1]), file)
    assert missing_units(plan) == [plan.units[0]]


@pytest.mark.parametrize("kind", ["shards", "rows"])
def test_a_kept_unit_whose_files_were_altered_since_runs_again(kind: str, folder: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    plan = plan_build(tree_for(folder), run_id="a")
    finish(plan)
    file = rng.choice(sorted((folder / "dataset" / kind).rglob("*.*")))
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    kept, missing = list(kept_results(plan.store, plan.units)), missing_units(plan)
    assert len(missing) == 1
    commit_results(plan, Finished(plan.listing, [*kept, *(write_unit(unit, plan.task) for unit in missing)]))
    verify_dataset(open_dataset(str(folder / "dataset")), deep=True).raise_if_failed()


def test_a_kill_just_behind_the_commit_leaves_nothing_for_ever(folder: Path):
    plan = plan_build(tree_for(folder), run_id="a")
    results = [write_unit(unit, plan.task) for unit in plan.units]
    shutil.copytree(folder / "dataset" / PENDING, folder / "left")
    commit_results(plan, Finished(plan.listing, results))
    assert pending(folder) == [] and not (folder / "dataset" / PENDING).exists()
    # The same build again, which has nothing to do.
    shutil.copytree(folder / "left", folder / "dataset" / PENDING)
    assert build_dataset(tree_for(folder), run_id="b").skipped
    assert pending(folder) == []
    # Another build, whose units are others.
    shutil.copytree(folder / "left", folder / "dataset" / PENDING)
    other = plan_build(tree_for(folder, _ETL.model_copy(update={"image_size": 8})), run_id="c")
    assert {pending_path(unit) for unit in other.units}.isdisjoint(pending(folder))
    commit_results(other, Finished(other.listing, [write_unit(unit, other.task) for unit in other.units]))
    assert pending(folder) == []


def test_records_of_another_build_that_was_interrupted_stay_until_they_are_abandoned(folder: Path):
    other = plan_build(tree_for(folder, _ETL.model_copy(update={"image_size": 8})), run_id="a")
    finish(other)
    left = pending(folder)
    plan = plan_build(tree_for(folder), run_id="b")
    commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
    assert sorted(pending(folder)) == sorted(left)
    assert missing_units(other) == []
    for path in left:
        os.utime(folder / "dataset" / path, (time.time() - 8 * 86_400,) * 2)
    assert build_dataset(tree_for(folder), run_id="c").skipped
    assert pending(folder) == []


def test_the_record_of_an_equal_unit_at_another_place_serves_both_builds(folder: Path):
    """Two builds at once whose listings differ elsewhere share the records of equal units."""
    plan = plan_build(tree_for(folder), run_id="a")
    places = [unit.index for unit in plan.units]
    for unit in plan.units:
        # As the other build wrote it, whose record it is as well: it must stay.
        keep_result(plan.store, unit, replace(write_unit(unit, plan.task), unit_index=unit.index + 1_000))
    before = pending(folder)
    assert [each.unit_index for each in finished_units(plan.store, plan.units)] == places
    kept = list(kept_results(plan.store, plan.units))
    assert [each.unit_index for each in kept] == places and pending(folder) == before
    manifest = commit_results(plan, Finished(plan.listing, kept))
    verify_dataset(open_dataset(str(folder / "dataset")), deep=True).raise_if_failed()
    tree = tree_for(folder)
    other = tree.model_copy(update={"dataset": DatasetConfig(uri=str(folder / "other"))})
    assert build_dataset(other, run_id="b").manifest.layout_digest == manifest.layout_digest


def test_the_record_of_another_unit_under_this_one_s_name_is_not_taken(folder: Path):
    plan = plan_build(tree_for(folder), run_id="a")
    unit, other = plan.units[:2]
    keep_result(plan.store, unit, write_unit(other, plan.task))
    assert [each.fingerprint for each in kept_results(plan.store, plan.units)] == [other.fingerprint]


@pytest.mark.parametrize("reason", RejectReason)
def test_a_refusal_is_believed_if_its_input_was_listed_and_cannot_be_repaired_unseen(
    folder: Path, reason: RejectReason
):
    """Another run may get another answer of a store, and nothing that is listed of an image shows its mask."""
    plan = plan_build(tree_for(folder), run_id="a")
    unit = plan.units[0]
    facts = [{"size_bytes": 5}, {"size_bytes": 0}, {"mtime_ns": 7}, {"etag": "e"}, {}]
    expected = [reason not in TRANSIENT_REASONS | ANNOTATION_REASONS] * 4 + [False]
    found = []
    for fact in facts:
        refused = replace(SourceImage("k", -1), **fact).rejected(reason, "detail")
        keep_result(plan.store, unit, UnitResult(unit.index, unit.fingerprint, (), (), (refused,), "0" * 64, ()))
        found.append(kept_result(plan.store, unit) is not None)
    assert found == expected


def test_inputs_known_by_name_alone_that_were_repaired_after_a_refusal_are_read_again(tmp_path: Path):
    write_images(tmp_path, num_images=40)
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png"))
    (tmp_path / "images").write_text("uri,label\n" + "".join(f"{name},{name.split('/')[0]}\n" for name in names))
    table = (tmp_path / "images").rename(tmp_path / "images.csv")
    whole = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(whole[:100])
    etl = _ETL.model_copy(update={"max_reject_fraction": 0.0})
    tree = tree_for(tmp_path, etl).model_copy(update={"source": SourceConfig(kind="table", uri=str(table))})
    with pytest.raises(RejectLimitExceeded):
        build_dataset(tree, run_id="refused")
    assert pending(tmp_path)
    (tmp_path / names[0]).write_bytes(whole)
    assert build_dataset(tree, run_id="repaired").manifest.counts.accepted == 40


def test_records_go_several_at_once(folder: Path, faulty: dict[str, Any]):
    """After a commit there may be one of each of 65,536 units, and a distant store takes a while for each."""
    plan = plan_build(tree_for(folder), run_id="a")
    finish(plan)
    assert len(pending(folder)) > 2
    both, calls = threading.Barrier(2), itertools.count()

    def together(store: FaultyStore, path: str) -> None:
        if next(calls) < 2:
            both.wait(120)
        store.sound.delete(path)

    shutil.copytree(folder / "dataset" / PENDING, folder / "left")
    manifest = commit_results(plan, Finished(plan.listing, finished_units(plan.store, plan.units)))
    shutil.copytree(folder / "left", folder / "dataset" / PENDING)
    faulty["delete"] = together
    clear_pending(open_store(f"faulty://{folder}/dataset"), plan.units, manifest)
    assert pending(folder) == []
