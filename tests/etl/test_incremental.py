"""A version of what has changed holds what a full build would, and nothing that was the same is decoded again."""

from __future__ import annotations

import os
import random
import re
import shutil
import tarfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.commit import commit_results
from etl.config import SourceConfig
from etl.job import BuildOutcome, build_dataset
from etl.later_runs.carry import carry
from etl.plan import plan_build, plan_changes
from etl.units.copy_rows import RowCopier, copy_rows
from etl.units.results import Finished
from etl.units.units import CopyUnit, UnitTask
from shardmill.dataset.build import UnitResult
from shardmill.dataset.index import read_shards
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import RejectLimitExceeded, StorageError
from shardmill.images.decoder_id import DECODER_ID, RULES_VERSION, SERVED_RULES
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.kernel import NATIVE_ID
from tests.etl.building import Recorder
from tests.etl.incremental import build, opened, paint, tree_for
from tests.lab.datasets import write_images
from tests.lab.scale import usually
from tests.shardmill.images.make import jpeg, photo, rgb_profile, with_profile

_SEED = random.SystemRandom().randrange(2**32)


def test_what_an_interrupted_run_has_copied_is_not_copied_again(tmp_path: Path):
    write_images(tmp_path / "images", num_images=90)
    build(tmp_path)
    for file in sorted((tmp_path / "images").rglob("*.png"))[::40]:
        file.unlink()
    plan, changes = plan_changes(plan_build(tree_for(tmp_path), run_id="second"), SilentObserver())
    assert changes is not None
    copied: list[int] = []

    def copy(units: Sequence[CopyUnit], task: UnitTask) -> Iterator[UnitResult]:
        for unit in units:
            copied.append(unit.index)
            yield copy_rows(unit, task)

    def lost() -> None:
        raise StorageError("lost just before the commit")

    with pytest.raises(StorageError, match="lost just before"):
        commit_results(plan, Finished(plan.work), changes, lost, copy=copy)
    manifest = commit_results(plan, Finished(plan.work), changes, copy=copy)
    assert copied and len(set(copied)) == len(copied)
    assert manifest.content_digest == build(tmp_path, "whole").manifest.content_digest


def test_a_version_that_stays_whole_is_added_up_without_reading_a_row(tmp_path: Path):
    write_images(tmp_path / "images", num_images=90)
    parent = build(tmp_path, unit_min_images=64).manifest
    paint(tmp_path / "images" / "class_0" / "new.png", random.Random(0))
    plan, changes = plan_changes(plan_build(tree_for(tmp_path, unit_min_images=64), run_id="second"), SilentObserver())
    assert changes is not None
    shards = read_shards(plan.store, parent)
    for file in (tmp_path / "dataset" / "rows").rglob("*.parquet"):
        file.unlink()
    copier = RowCopier(plan.rows, plan.task.config)
    (result,) = carry(parent, changes, copier, plan.task, lambda units, task: pytest.fail("nothing is to be copied"))
    assert {*result.shards} == {*shards}
    assert {part.split: part.row_digest_sum for part in result.splits} == {
        name: split.row_digest_sum for name, split in parent.splits.items()
    }


def test_any_series_of_changes_ends_with_the_content_of_a_full_build(tmp_path: Path):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    for step in range(usually(3, 20)):
        files = sorted((tmp_path / "images").rglob("*.png"))
        for file in rng.sample(files, rng.randrange(4)):
            file.unlink()
        for file in rng.sample(files, rng.randrange(4)):
            paint(file, rng)
        for number in range(rng.randrange(5)):
            paint(tmp_path / "images" / f"class_{rng.randrange(4)}" / f"new_{step}_{number}.png", rng)
        if rng.random() < 0.5:
            left = [file for file in files if file.exists()]
            shutil.copy(rng.choice(left), tmp_path / "images" / "class_0" / f"copy_{step}.png")
        if step == 1:
            shutil.move(tmp_path / "images" / "class_1", tmp_path / "images" / "a_class")
        outcome = build(tmp_path)
        whole = build(tmp_path, f"whole_{step}")
        assert outcome.manifest.content_digest == whole.manifest.content_digest
        assert outcome.manifest.counts == whole.manifest.counts
        assert outcome.manifest.ledger_digest == whole.manifest.ledger_digest
        assert outcome.manifest.channel_sums == whole.manifest.channel_sums
        verify_dataset(opened(tmp_path), deep=True).raise_if_failed()
        assert build(tmp_path).skipped


def test_added_images_alone_are_read_and_the_old_shards_stay(tmp_path: Path):
    write_images(tmp_path / "images", num_images=90)
    first = build(tmp_path, unit_min_images=64)
    before = {shard.path for shard in opened(tmp_path).shards}
    rng = random.Random(1)
    for number in range(3):
        paint(tmp_path / "images" / "class_1" / f"new_{number}.png", rng)
    recorder = Recorder()
    outcome = build(tmp_path, recorder=recorder, unit_min_images=64)
    assert recorder.events["etl.changes"] == {"unchanged": 90, "to_process": 3, "removed": 0}
    assert (outcome.num_images_read, outcome.manifest.operation) == (3, "incremental")
    assert outcome.manifest.parent_version == first.manifest.version == 1
    assert before < {shard.path for shard in opened(tmp_path).shards}


def test_a_new_class_takes_the_next_number_and_a_class_that_is_gone_keeps_its_own(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    paint(tmp_path / "images" / "aardvark" / "1.png", random.Random(1))
    grown = build(tmp_path).manifest
    assert grown.class_names == ("class_0", "class_1", "class_2", "aardvark")
    shutil.rmtree(tmp_path / "images" / "class_1")
    shrunk = build(tmp_path).manifest
    assert shrunk.class_names == grown.class_names
    assert sum(info.class_counts[1] for info in shrunk.splits.values()) == 0
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_what_was_refused_is_not_read_again_unless_it_changes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    broken = tmp_path / "images" / "class_0" / "broken.png"
    broken.write_bytes(b"<html>not found</html>")
    build(tmp_path)
    paint(tmp_path / "images" / "class_0" / "new.png", random.Random(1))
    assert build(tmp_path).num_images_read == 1
    assert opened(tmp_path).manifest.counts.by_reason == {"not_an_image": 1}
    paint(broken, random.Random(2))
    outcome = build(tmp_path)
    assert (outcome.num_images_read, outcome.manifest.counts.by_reason) == (1, {})


def test_a_touched_file_makes_no_version_and_is_processed_once(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    os.utime(tmp_path / "images" / "class_0" / "00000.png", ns=(1, 1))
    touched = build(tmp_path)
    assert (touched.manifest.version, touched.published, touched.num_images_read) == (1, False, 1)
    num_files = sum(1 for _ in (tmp_path / "dataset").rglob("*"))
    again = build(tmp_path)
    assert (again.manifest.version, again.num_images_read, again.num_units_kept) == (1, 0, 1)
    assert sum(1 for _ in (tmp_path / "dataset").rglob("*")) == num_files


def test_rows_of_a_lost_shard_are_made_again_and_no_others(tmp_path: Path):
    write_images(tmp_path / "images", num_images=90)
    build(tmp_path)
    before = opened(tmp_path)
    lost = before.shards[0]
    (tmp_path / "dataset" / lost.path).unlink()
    outcome = build(tmp_path)
    assert (outcome.num_images_read, outcome.manifest.version) == (lost.num_rows, 2)
    assert outcome.manifest.content_digest == before.manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


@pytest.mark.parametrize("change", [{"image_size": 8}, {"seed": 3}, {"formats": ("parquet",)}])
def test_another_config_builds_all_of_it(change: dict[str, object], tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    paint(tmp_path / "images" / "class_0" / "new.png", random.Random(1))
    outcome = build(tmp_path, **change)
    assert (outcome.num_images_read, outcome.manifest.operation) == (61, "full")


def test_a_new_archive_alone_is_read(tmp_path: Path):
    write_images(tmp_path / "files", num_images=40)
    files = sorted((tmp_path / "files").rglob("*.png"))
    (tmp_path / "images").mkdir()

    def pack(name: str, some: list[Path]) -> None:
        with tarfile.open(tmp_path / "images" / name, "w") as archive:
            for file in some:
                archive.add(file, arcname=f"{file.parent.name}/{file.name}")

    def build_archives(dataset: str) -> BuildOutcome:
        source = SourceConfig(uri=str(tmp_path / "images"), kind="webdataset")
        tree = tree_for(tmp_path, dataset).model_copy(update={"source": source})
        return build_dataset(tree, run_id=uuid.uuid4().hex)

    pack("a.tar", files[:20])
    pack("b.tar", files[20:34])
    assert build_archives("dataset").num_images_read == 34
    pack("c.tar", files[34:])
    grown = build_archives("dataset")
    assert (grown.num_images_read, grown.manifest.operation) == (6, "incremental")
    assert grown.manifest.content_digest == build_archives("whole").manifest.content_digest


AVIF = SERVED_RULES[5].rpartition("-")[2]
DIFFERENCE = {rules: f"libavif none -> {AVIF}, rules {rules} -> {RULES_VERSION}" for rules in ("3", "4")}


def decoding_by(monkeypatch: pytest.MonkeyPatch, **parts: str) -> None:
    """The decoders of this machine are called as older or newer ones: rules="5", pillow="9.9"."""
    name = DECODER_ID if int(parts.get("rules", RULES_VERSION)) > 5 else DECODER_ID.replace(SERVED_RULES[5], "")
    for part, version in parts.items():
        name = re.sub(rf"\b{part}-[^+]*", f"{part}-{version}", name)
    monkeypatch.setattr("shardmill.images.decoder_id.DECODER_ID", name)


class Warnings(SilentObserver):
    def __init__(self) -> None:
        self.said: list[str] = []

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.said += [str(fields["warning"])] if name == "etl.warning" else []


@pytest.mark.parametrize(("rules", "num_again"), [("5", 0), ("4", 1), ("3", 41)])
def test_newer_rules_decode_only_what_they_may_change(rules: str, num_again: int, tmp_path: Path, monkeypatch):
    write_images(tmp_path / "images", num_images=40)
    for name in ("a.bmp", "b.jpg"):
        assert cv2.imwrite(str(tmp_path / "images" / "class_0" / name), np.full((16, 16, 3), 90, np.uint8))
    with monkeypatch.context() as older:
        decoding_by(older, rules=rules)
        first = build(tmp_path)
    again = build_dataset(tree_for(tmp_path), run_id="again", observer=(seen := Warnings()))
    # They turn out to be equal: of the same rows comes no version, which would be trained on again.
    assert (again.manifest, again.num_images_read) == (first.manifest, num_again)
    assert [each for each in seen.said if "decoded again" in each] == (
        [f"{num_again} of the 42 images of version 1 are decoded again, because of the decoder ({DIFFERENCE[rules]})"]
        if num_again
        else []
    )
    # What is added later stands beside them, and the pixels are those of a full build.
    paint(tmp_path / "images" / "class_0" / "new.png", random.Random(1))
    later = build(tmp_path)
    assert later.num_images_read <= 1 + num_again and later.manifest.operation == "incremental"
    assert later.manifest.content_digest == build(tmp_path, "whole").manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


@pytest.mark.skipif(not NATIVE_ID, reason="the native kernel is not built")
@pytest.mark.parametrize(("has_profile", "num_again"), [(False, 0), (True, 1)])
def test_a_kernel_that_moves_colours_decodes_again_where_there_are_some(
    has_profile: bool, num_again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_images(tmp_path / "images", num_images=10)
    data = jpeg(photo(40, 40))
    (tmp_path / "images/class_0/a.jpg").write_bytes(with_profile(data, rgb_profile()) if has_profile else data)
    with monkeypatch.context() as older:
        older.setattr("shardmill.images.decoder_id.NATIVE_ID", re.sub("native-[0-9]+", "native-1", NATIVE_ID))
        first = build(tmp_path)
        assert "+native-1+" in first.manifest.decoder_id
    again = build(tmp_path)
    assert (again.manifest, again.num_images_read) == (first.manifest, num_again)


@pytest.mark.parametrize(
    ("parts", "settings", "reason"),
    [
        ({"pillow": "9.9"}, {}, r"the decoder \(pillow 9.9 -> "),
        ({"simplejpeg": "1.0", "opencv": "4.0"}, {}, r"the decoder \(opencv 4.0 -> .*, simplejpeg 1.0 -> "),
        ({}, {"image_size": 24}, r"the config \(etl.image_size 16 -> 24\)"),
        ({}, {"formats": ("parquet",)}, r"the config \(etl.formats "),
        ({"pillow": "9.9"}, {"resize_mode": "pad"}, r"the decoder .*; the config \(etl.resize_mode crop -> pad\)"),
    ],
)
def test_a_dataset_is_not_decoded_again_without_a_word(
    parts: dict[str, str], settings: dict[str, object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_images(tmp_path / "images", num_images=30)
    with monkeypatch.context() as older:
        decoding_by(older, **parts)
        build(tmp_path)
    with pytest.raises(RejectLimitExceeded, match=f"30 of the 30 images of version 1 would be .*{reason}") as refused:
        build(tmp_path, max_redecoded_fraction=0.5, **settings)
    assert refused.value.exit_code == 7 and opened(tmp_path).manifest.version == 1
    built = build_dataset(tree_for(tmp_path, **settings), run_id="again", observer=(seen := Warnings()))
    assert built.manifest.version == 2 and any(re.search(reason, each) for each in seen.said)
    # Settings that decide no pixel, and a first build, are no reason.
    assert build(tmp_path, max_redecoded_fraction=0, num_workers=3, **settings).manifest.version == 2
    assert build(tmp_path, "other", max_redecoded_fraction=0).manifest.version == 1
