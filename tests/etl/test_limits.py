"""Limits on what may be refused: faults of access and of a moving source never become a smaller dataset unseen."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from etl.checks.limits import LIMITS
from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import plan_build
from etl.units.finished import Finished
from etl.units.write_unit import write_unit
from pipeline.output.inspection import list_rejections
from shardmill.dataset.ledger import read_ledger
from shardmill.dataset.versions import latest_version
from shardmill.errors import AccessDenied, IntegrityError, RejectLimitExceeded, ShardmillError, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.run_files import failed_stage
from shardmill.stores import open_store
from shardmill.values import REASONS_OUTSIDE_REJECT_FRACTION, RejectReason
from tests.lab.datasets import HERE, write_images
from tests.services.faulty_store import FaultyStore

ETL = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=20)


def tree_for(folder: Path, scheme: str = "", **etl: object) -> EtlTree:
    source, dataset = SourceConfig(uri=f"{scheme}{folder}/images"), DatasetConfig(uri=str(folder / "dataset"))
    return EtlTree(source=source, dataset=dataset, etl=ETL.model_copy(update=etl))


def build(tree: EtlTree) -> None:
    plan = plan_build(tree, run_id="a")
    commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))


def test_every_reason_counts_against_exactly_one_limit_or_is_stated_as_outside():
    counted = [reason for limit in LIMITS for reason in limit.reasons]
    assert sorted([*counted, *REASONS_OUTSIDE_REJECT_FRACTION]) == sorted(RejectReason)


def test_denied_access_publishes_nothing_unless_the_config_allows_it(tmp_path: Path, faulty: dict[str, Any]):
    write_images(tmp_path / "images", num_images=60)

    def denied(store: FaultyStore, path: str) -> bytes:
        # For root, who may run this test, no file is unreadable.
        if path.endswith("00007.png"):
            raise AccessDenied(f"cannot access {store.uri}/{path}: Permission denied")
        return store.sound.read(path)

    faulty["read"] = denied
    with pytest.raises(
        StorageError, match=r"1 of 60 inputs could not be read .*class_1/00007.png: unreadable"
    ) as caught:
        build(tree_for(tmp_path, "faulty://"))
    assert "etl.max_unreadable_fraction allows 0; nothing was published" in str(caught.value)
    assert latest_version(open_store(tmp_path / "dataset")) == 0
    build(tree_for(tmp_path, "faulty://", max_unreadable_fraction=0.02))


def test_files_that_vanish_beyond_the_limit_publish_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_build(tree_for(tmp_path), run_id="a")
    for number in (1, 4, 7, 10):
        (tmp_path / "images" / "class_1" / f"{number:05d}.png").unlink()
    with pytest.raises(StorageError, match=r"4 of 60 inputs vanished or changed .*\(missing 4\)") as caught:
        commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
    assert str(caught.value).count(".png: missing") == 3
    assert "max_changed_fraction allows 0.01; nothing was published" in str(caught.value)
    assert latest_version(open_store(tmp_path / "dataset")) == 0


def broken_listing(root: Path) -> None:
    write_images(root / "images", num_images=20)
    for number in range(4):
        (root / "images" / "class_0" / f"dangling\x1b[2J{number}.png").symlink_to("/nowhere")


def test_a_limit_that_the_listing_breaks_ends_before_any_unit(tmp_path: Path):
    broken_listing(tmp_path)
    with pytest.raises(RejectLimitExceeded, match=r"4 of 24 inputs were rejected \(dangling_symlink 4\)") as caught:
        build_dataset(tree_for(tmp_path), run_id="a")
    message = str(caught.value)
    assert message.count(": dangling_symlink") == 3 and r"dangling\x1b[2J0.png" in message and "\x1b" not in message
    assert {file.path.split("/")[0] for file in open_store(tmp_path / "dataset").list("")} == {"rejects"}


def test_the_line_of_a_broken_limit_accounts_for_every_row_of_the_ledger(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20)
    folder = tmp_path / "images" / "class_0"
    (folder / "link.png").symlink_to("/nowhere")
    os.mkfifo(folder / "pipe.png")
    (folder / "outside.png").symlink_to("/dev/null")
    (folder / "up").symlink_to(tmp_path / "images" / "class_1")
    (folder / "notes.txt").write_text("a note")
    with pytest.raises(RejectLimitExceeded) as caught:
        build_dataset(tree_for(tmp_path), run_id="a")
    message = str(caught.value)
    reasons = re.search(r"4 of 25 inputs were rejected \((.*?)\)", message)
    assert reasons is not None and sum(map(int, re.findall(r" (\d+)", reasons[1]))) == 4
    assert "not counted: not_an_image_name 1" in message
    # The report of the failed run finds the ledger by the record of its stage.
    assert len(read_ledger(failed_stage("etl", caught.value).detail["ledger"])) == 5


def test_the_rejects_of_a_dataset_without_a_version_name_the_ledger_of_the_failed_build(tmp_path: Path):
    broken_listing(tmp_path)
    with pytest.raises(RejectLimitExceeded) as failed:
        build_dataset(tree_for(tmp_path), run_id="a")
    with pytest.raises(UsageError, match="has no version") as caught:
        list_rejections(str(tmp_path / "dataset"))
    found = re.search(r"`shardmill inspect --rejects (\S+)`", str(caught.value))
    assert found is not None and found[1] in str(failed.value)


def test_a_wrong_source_is_named_before_its_rejects_are_counted(tmp_path: Path):
    write_images(tmp_path / "right" / "images", num_images=20)
    build(tree_for(tmp_path / "right"))
    broken_listing(tmp_path / "wrong")
    tree = tree_for(tmp_path / "wrong").model_copy(
        update={"dataset": DatasetConfig(uri=str(tmp_path / "right" / "dataset"))}
    )
    with pytest.raises(UsageError, match="--replace-source"):
        build_dataset(tree, run_id="b")
    assert not (tmp_path / "right" / "dataset" / "rejects").exists()


@pytest.mark.parametrize("allowed", [0.0, 0.5])
def test_litter_counts_against_no_limit(allowed: float, tmp_path: Path):
    write_images(tmp_path / "images", num_images=20)
    for number in range(30):
        (tmp_path / "images" / "class_0" / f"{number}.txt").write_text("a note")
    build(tree_for(tmp_path, max_reject_fraction=allowed))
    (tmp_path / "images" / "class_0" / "x.png").write_bytes(b"no image")
    if allowed == 0.0:
        with pytest.raises(ShardmillError):
            build(tree_for(tmp_path, max_reject_fraction=allowed))


def test_the_ledger_of_a_build_that_failed_can_be_read(tmp_path: Path):
    broken_listing(tmp_path)
    with pytest.raises(RejectLimitExceeded) as caught:
        build_dataset(tree_for(tmp_path), run_id="a")
    found = re.search(r"`shardmill inspect --rejects (\S+)`", str(caught.value))
    assert found is not None
    assert {rejection.reason for rejection in read_ledger(found[1])} == {RejectReason.DANGLING_SYMLINK}
    ledger = Path(found[1])
    ledger.write_bytes(ledger.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match="was altered"):
        read_ledger(str(ledger))


@pytest.mark.parametrize("num_missing, is_refused", [(2, False), (4, True), (60, True)])
def test_files_that_a_table_names_and_that_are_not_there_are_rejected(
    num_missing: int, is_refused: bool, tmp_path: Path
):
    write_images(tmp_path / "images", num_images=60)
    files = sorted((tmp_path / "images").rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path / 'images').as_posix()},{file.parent.name}\n" for file in files]
    (tmp_path / "images" / "t.csv").write_text("uri,label\n" + "".join(rows))
    for file in files[:num_missing]:
        file.unlink()
    tree = tree_for(tmp_path)
    table = SourceConfig(uri=str(tmp_path / "images" / "t.csv"), kind="table")
    plan = plan_build(tree.model_copy(update={"source": table}), run_id="a")
    results = [write_unit(unit, plan.task) for unit in plan.units]
    if is_refused:
        with pytest.raises(RejectLimitExceeded, match=rf"{num_missing} of 60 inputs were rejected \(missing"):
            commit_results(plan, Finished(plan.listing, results))
    else:
        assert commit_results(plan, Finished(plan.listing, results)).counts.by_reason == {"missing": num_missing}
    # Without the table nothing tells whether the folder is there at all.
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(StorageError, match="does not see the source"):
        write_unit(plan.units[0], plan.task)
