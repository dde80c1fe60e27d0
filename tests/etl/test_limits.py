"""What ends a build: too many rejects, lost classes, wrong input, each with its limit."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from etl.checks.limits import LIMITS
from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from etl.plan import plan_build
from etl.units.results import Finished
from etl.units.write_unit import write_unit
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.inspection import failed_ledger, list_rejections
from shardmill.dataset.ledger import read_ledger, read_rejections
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.maintenance.gc import Retention, collect_garbage
from shardmill.dataset.maintenance.rollback import roll_back
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import AccessDenied, IntegrityError, RejectLimitExceeded, ShardmillError, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.run_files import failed_stage
from shardmill.stores import open_store
from shardmill.values import REASONS_OUTSIDE_REJECT_FRACTION, Rejection, RejectReason
from tests.bad_images import interlaced_png
from tests.bad_input import BadInput
from tests.bad_inputs import all_inputs, write_inputs
from tests.etl.building import build_source
from tests.etl.incremental import build, opened, paint
from tests.lab.datasets import HERE, write_images
from tests.services.faulty_store import FaultyStore
from tests.shardmill.images.make import decode, gray_photo

ETL = EtlConfig(engine=HERE, image_size=16, encoding="png", unit_min_images=20)


def limited(folder: Path, scheme: str = "", **etl: object) -> EtlTree:
    source, dataset = SourceConfig(uri=f"{scheme}{folder}/images"), DatasetConfig(uri=str(folder / "dataset"))
    return EtlTree(source=source, dataset=dataset, etl=ETL.model_copy(update=etl))


def build_limited(tree: EtlTree) -> None:
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
        build_limited(limited(tmp_path, "faulty://"))
    assert "etl.max_unreadable_fraction allows 0; nothing was published" in str(caught.value)
    assert latest_version(open_store(tmp_path / "dataset")) == 0
    build_limited(limited(tmp_path, "faulty://", max_unreadable_fraction=0.02))


def test_files_that_vanish_beyond_the_limit_publish_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    plan = plan_build(limited(tmp_path), run_id="a")
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
        build_dataset(limited(tmp_path), run_id="a")
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
        build_dataset(limited(tmp_path), run_id="a")
    message = str(caught.value)
    reasons = re.search(r"4 of 25 inputs were rejected \((.*?)\)", message)
    assert reasons is not None and sum(map(int, re.findall(r" (\d+)", reasons[1]))) == 4
    assert "not counted: not_an_image_name 1" in message
    # The report of the failed run finds the ledger by the record of its stage.
    assert len(read_ledger(failed_stage("etl", caught.value).detail["ledger"])) == 5


def test_a_wrong_source_is_named_before_its_rejects_are_counted(tmp_path: Path):
    write_images(tmp_path / "right" / "images", num_images=20)
    build_limited(limited(tmp_path / "right"))
    broken_listing(tmp_path / "wrong")
    tree = limited(tmp_path / "wrong").model_copy(
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
    build_limited(limited(tmp_path, max_reject_fraction=allowed))
    (tmp_path / "images" / "class_0" / "x.png").write_bytes(b"no image")
    if allowed == 0.0:
        with pytest.raises(ShardmillError):
            build_limited(limited(tmp_path, max_reject_fraction=allowed))


def test_the_ledger_of_a_build_that_failed_can_be_read(tmp_path: Path):
    broken_listing(tmp_path)
    with pytest.raises(RejectLimitExceeded) as failed:
        build_dataset(limited(tmp_path), run_id="a")
    found = re.search(r"`shardmill inspect --rejects (\S+)`", str(failed.value))
    assert found is not None and failed_ledger(str(tmp_path / "dataset")) == found[1]
    assert {rejection.reason for rejection in read_ledger(found[1])} == {RejectReason.DANGLING_SYMLINK}
    # That of a dataset without a version is shown to who asks for its rejects, too.
    [*rejections] = list_rejections(str(tmp_path / "dataset")).rejections
    assert {each.reason for each in rejections} == {"dangling_symlink"}
    ledger = Path(found[1])
    ledger.write_bytes(ledger.read_bytes()[:-1] + b"x")
    with pytest.raises(IntegrityError, match="was altered"):
        read_ledger(str(ledger))


@pytest.mark.parametrize("num_missing, is_refused", [(2, False), (4, True), (60, True)])
def test_files_that_a_table_names_and_that_are_not_there_are_rejected(num_missing: int, is_refused: bool, tmp_path):
    write_images(tmp_path / "images", num_images=60)
    files = sorted((tmp_path / "images").rglob("*.png"))
    rows = [f"{file.relative_to(tmp_path / 'images').as_posix()},{file.parent.name}\n" for file in files]
    (tmp_path / "images" / "t.csv").write_text("uri,label\n" + "".join(rows))
    for file in files[:num_missing]:
        file.unlink()
    tree = limited(tmp_path)
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


def rename_class(images: Path) -> None:
    shutil.move(images / "class_1", images / "zebra")


def rename_to_sort_first(images: Path) -> None:
    shutil.move(images / "class_1", images / "aardvark")


def merge_classes(images: Path) -> None:
    for file in (images / "class_1").iterdir():
        shutil.move(file, images / "class_0" / f"moved_{file.name}")


def delete_class(images: Path) -> None:
    shutil.rmtree(images / "class_1")


def spoil_class(images: Path) -> None:
    for file in (images / "class_1").iterdir():
        file.write_bytes(b"<html>not found</html>")


def lose_and_gain(images: Path) -> None:
    shutil.rmtree(images / "class_0")
    for number in range(4):
        paint(images / "aardvark" / f"{number}.png", random.Random(number))


CHANGES = [rename_class, rename_to_sort_first, merge_classes, delete_class, spoil_class, lose_and_gain]


def same_as_full(folder: Path, grown: Manifest) -> None:
    whole = build(folder, f"whole_{uuid.uuid4().hex[:8]}").manifest
    assert grown.content_digest == whole.content_digest
    assert (grown.counts, grown.ledger_digest, grown.channel_sums) == (
        whole.counts, whole.ledger_digest, whole.channel_sums
    )  # fmt: skip
    verify_dataset(opened(folder), deep=True).raise_if_failed()


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_class_has_lost_its_images_this_and_every_later_version_equals_a_full_build(
    tmp_path: Path, change: Callable[[Path], None]
):
    write_images(tmp_path / "images", num_images=60)
    first = build(tmp_path).manifest
    change(tmp_path / "images")
    outcome = build(tmp_path)
    assert outcome.manifest.operation == "incremental"
    # No class has another number than before.
    assert outcome.manifest.class_names[:3] == first.class_names
    assert outcome.manifest.empty_classes
    same_as_full(tmp_path, outcome.manifest)
    assert build(tmp_path).skipped

    paint(tmp_path / "images" / "class_2" / "later.png", random.Random(1))
    later = build(tmp_path).manifest
    assert (later.version, later.operation) == (3, "incremental")
    same_as_full(tmp_path, later)

    # The images that come back find their class again.
    paint(tmp_path / "images" / later.empty_classes[0] / "back.png", random.Random(2))
    back = build(tmp_path).manifest
    assert back.class_names == later.class_names
    same_as_full(tmp_path, back)


def test_versions_made_of_such_a_version_keep_its_content_digest(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    rename_to_sort_first(tmp_path / "images")
    lost = build(tmp_path).manifest
    store = open_store(tmp_path / "dataset")
    compacted = compact_dataset(opened(tmp_path), "compacting")
    assert compacted.num_rows_copied and compacted.manifest.content_digest == lost.content_digest
    paint(tmp_path / "images" / "class_0" / "later.png", random.Random(1))
    build(tmp_path)
    again = roll_back(store, lost.version, "back").manifest
    assert again.content_digest == lost.content_digest
    assert collect_garbage(store, Retention(1, older_than_seconds=0.0), "gc").expired
    assert opened(tmp_path).manifest.content_digest == lost.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()
    same_as_full(tmp_path, build(tmp_path).manifest)


def test_a_class_of_a_split_that_is_gone_counts_no_more(tmp_path: Path):
    write_images(tmp_path / "images" / "train", num_images=40, num_classes=2)
    write_images(tmp_path / "images" / "test", num_images=9, num_classes=3, seed=1)
    assert len(build(tmp_path).manifest.class_names) == 3
    shutil.rmtree(tmp_path / "images" / "test" / "class_2")
    lost = build(tmp_path).manifest
    assert lost.empty_classes == ("class_2",)
    same_as_full(tmp_path, lost)
    shutil.rmtree(tmp_path / "images" / "test")
    same_as_full(tmp_path, build(tmp_path).manifest)


def test_an_appended_source_equals_a_full_build_of_both(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    delete_class(tmp_path / "images")
    build(tmp_path)
    rng = random.Random(3)
    for number in range(20):
        paint(tmp_path / "tuesday" / f"a_new_class_{number % 2}" / f"{number}.png", rng)
    appended = build(tmp_path, source=SourceConfig(uri=str(tmp_path / "tuesday")), write_mode="append").manifest
    assert appended.operation == "append"
    shutil.copytree(tmp_path / "tuesday", tmp_path / "images", dirs_exist_ok=True)
    same_as_full(tmp_path, appended)


def test_a_class_of_several_that_no_row_has_any_more(tmp_path: Path):
    (tmp_path / "images").mkdir()
    for number in range(40):
        paint(tmp_path / "images" / f"{number:03d}.png", random.Random(number))

    def build_table(dataset: str, names: dict[int, list[str]]) -> BuildOutcome:
        with open(tmp_path / "images" / "table.csv", "w", newline="") as out:
            rows = [(f"{number:03d}.png", json.dumps(labels)) for number, labels in names.items()]
            csv.writer(out).writerows([("uri", "label"), *rows])
        source = SourceConfig(uri=str(tmp_path / "images" / "table.csv"), kind="table", label_kind="multi_label")
        return build(tmp_path, dataset, source=source)

    labels = {number: ["night", "sky"] if number % 2 else ["night"] for number in range(40)}
    build_table("dataset", {**labels, 7: ["dog", "sky"]})
    labels[7] = ["cat", "sky"]
    grown = build_table("dataset", labels).manifest
    assert (grown.operation, grown.empty_classes) == ("incremental", ("dog",))
    assert grown.content_digest == build_table("whole", labels).manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_a_layout_distinguishes_label_maps_that_give_its_classes_other_numbers(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30, num_classes=2)
    maps = [
        ("class_0", "class_1"),
        ("class_1", "class_0"),
        ("class_0", "between", "class_1"),
        ("class_0", "class_1", "x"),
    ]
    manifests = [build(tmp_path, f"dataset_{place}", label_map=names).manifest for place, names in enumerate(maps)]
    assert len({each.content_digest for each in manifests}) == 1
    assert len({each.layout_digest for each in manifests}) == len(maps)
    assert build(tmp_path, "found").manifest.layout_digest == manifests[0].layout_digest


TABLE = Path(__file__).parents[2] / "docs" / "rejects.md"
NUM_ROWS = 105
# Not files of one tree: root may read everything, and the others are tables, URLs, label maps and whole sources.
TESTED_ELSEWHERE = {91, 98, 102, 103, 104, 105}


def test_every_file_of_the_table_ends_as_its_row_says(tmp_path: Path) -> None:
    inputs = {each.key: each for each in write_inputs(tmp_path / "source")}
    manifest = build_source(
        SourceConfig(uri=str(tmp_path / "source")), tmp_path / "dataset", image_size=24, max_reject_fraction=1.0
    )

    dataset = open_dataset(str(tmp_path / "dataset"))
    accepted: dict[str, tuple[str, ...]] = {}
    for split in manifest.splits:
        for uri in dataset.files(split, "parquet"):
            rows = pq.ParquetFile(uri).read(["source", "notes"]).to_pylist()
            accepted |= {row["source"]: tuple(filter(None, row["notes"].split(","))) for row in rows}
    rejected = {each.key: each for each in read_rejections(dataset.store, manifest)}
    wrong = [found for each in inputs.values() if (found := problem(each, accepted, rejected))]
    assert not wrong, "\n".join(wrong)
    assert accepted.keys() | rejected.keys() == inputs.keys()
    assert manifest.counts.listed == len(inputs) == len(accepted) + len(rejected)
    assert manifest.counts.conflicting_label >= 2


def problem(expected: BadInput, accepted: dict[str, tuple[str, ...]], rejected: dict[str, Rejection]) -> str:
    """What is wrong about this file; empty if nothing."""
    where = f"row {expected.row}, {expected.key!r}"
    if expected.reason is None:
        if expected.key not in accepted:
            return f"{where}: rejected as {rejected.get(expected.key)}"
        notes = accepted[expected.key]
        return "" if notes == expected.notes else f"{where}: notes {notes}, expected {expected.notes}"
    if expected.key not in rejected:
        return f"{where}: accepted with {accepted.get(expected.key)}, expected {expected.reason}"
    found = rejected[expected.key]
    if found.reason is not expected.reason or not found.detail.startswith(expected.detail):
        return f"{where}: {found.reason} ({found.detail}), expected {expected.reason} {expected.detail}"
    return ""


def test_the_table_has_a_decision_for_every_row_and_a_file_for_every_row_that_is_one() -> None:
    ranges = re.findall(r"^\| (\d+)(?:-(\d+))? \|", TABLE.read_text(), flags=re.MULTILINE)
    rows = [row for first, last in ranges for row in range(int(first), int(last or first) + 1)]
    assert rows == list(range(1, NUM_ROWS + 1))
    built = {each.row for each in all_inputs()}
    assert not built & TESTED_ELSEWHERE
    assert built | TESTED_ELSEWHERE == set(range(1, NUM_ROWS + 1))


def test_keys_are_written_as_they_are(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path)
    found = {str(Path(folder, name).relative_to(tmp_path)) for folder, _, names in os.walk(tmp_path) for name in names}
    assert found | {"links/upwards"} == {each.key for each in inputs}


def test_an_interlaced_png_is_put_together() -> None:
    assert np.array_equal(decode(interlaced_png(gray_photo())).pixels_HWC[:, :, 0], gray_photo())
