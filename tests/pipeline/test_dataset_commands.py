"""Commands on datasets and predictions."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shutil
import sys
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from typer.testing import CliRunner

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from pipeline.cli import app
from pipeline.cli_options import Common
from pipeline.commands.dry_run import DryRun, dry_run
from pipeline.commands.predict import check_any_predicted, prediction_csv, prediction_rows
from pipeline.config import load_pipeline
from pipeline.demo.data import DemoImages, OddFile, digit_key, encode_digit, load_digits, odd_files, write_demo_images
from pipeline.output import progress
from pipeline.report.write import gather
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.leases import writing
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.errors import RejectLimitExceeded, StorageError, UsageError
from shardmill.formats.encodings import decode_stored
from shardmill.images.process import process_image
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.etl.building import images_of, list_images
from tests.etl.incremental import paint
from tests.etl.pixels import predict_pixels
from tests.lab.commands import BUILD_HERE, SUMMARY_SCHEMA, in_process, last_line
from tests.lab.datasets import make_dataset, write_images
from tests.services.faulty_store import FaultyStore
from train.published.predict import Guess, Prediction


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return make_dataset(tmp_path, num_images=120)


def machine(*arguments: str, cwd: Path) -> Any:
    done = in_process(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compact_says_what_it_made_and_when_there_was_nothing_to_do(dataset: str, tmp_path: Path):
    first = machine("compact", dataset, cwd=tmp_path)
    assert (first["version"], first["is_new"]) == (2, True)
    assert first["num_shards_after"] < first["num_shards_before"]
    assert first["content_digest"] == open_dataset(f"{dataset}@1").manifest.content_digest
    again = machine("compact", dataset, cwd=tmp_path)
    assert (again["version"], again["is_new"], again["num_rows_copied"]) == (2, False, 0)
    refused = in_process("compact", f"{dataset}@1", cwd=tmp_path)
    assert refused.returncode == 2 and "names one version" in last_line(refused)


def test_inspect_shows_what_a_person_asks_and_with_all_the_digests(dataset: str, tmp_path: Path):
    rows = [line.split("\t") for line in in_process("inspect", dataset, cwd=tmp_path).stdout.splitlines()[1:]]
    counts = machine("inspect", dataset, cwd=tmp_path)["counts"]
    names = [name for name, *_ in rows]
    assert names[0] == "images" and f"{counts['accepted']} accepted" in rows[0][1]
    assert names[1].startswith("in ") and {"classes", "size", "stored"} < set(names[:8])
    assert any(name.startswith("class ") and " train" in row[0] for name, *row in rows) and len(rows) < 20
    everything = in_process("inspect", dataset, "--all", cwd=tmp_path).stdout.splitlines()[1:]
    assert [line.partition("\t")[0] for line in everything[-2:]] == ["content_digest", "layout_digest"]


def test_gc_lists_first_and_deletes_on_request(dataset: str, tmp_path: Path):
    machine("compact", dataset, cwd=tmp_path)
    young = machine("gc", dataset, "--keep", "1", cwd=tmp_path)
    assert (young["expired_versions"], young["num_files"]) == ([], 0)
    said = in_process("gc", dataset, "--keep", "1", cwd=tmp_path).stderr
    assert "kept more than 1: what is younger than 7d (--older-than) or in use stays" in said
    listed = machine("gc", dataset, "--keep", "1", "--older-than", "0", cwd=tmp_path)
    assert (listed["expired_versions"], listed["deleted"]) == ([1], False)
    assert all(Path(dataset, file["path"]).exists() for file in listed["files"]) and listed["num_files"]
    done = in_process("gc", dataset, "--keep", "1", "--older-than", "0s", "--delete", cwd=tmp_path)
    assert done.returncode == 0 and "expired\t1" in done.stdout, done.stderr
    assert not any(Path(dataset, file["path"]).exists() for file in listed["files"])
    refused = in_process("inspect", f"{dataset}@1", cwd=tmp_path)
    assert refused.returncode == 2 and "@1 has expired" in last_line(refused)
    assert in_process("verify", dataset, "--deep", cwd=tmp_path).returncode == 0


def test_gc_ends_with_6_beside_a_writer(dataset: str, tmp_path: Path):
    with writing(open_store(dataset), "etl"):
        refused = in_process("gc", dataset, "--delete", cwd=tmp_path)
    assert refused.returncode == 6 and "is at work" in last_line(refused)


def test_a_wrong_uri_is_answered_with_what_the_command_takes(dataset: str, tmp_path: Path):
    write_images(tmp_path / "photos", num_images=3)
    (tmp_path / "models" / "exports").mkdir(parents=True)
    (tmp_path / "models" / "exports" / "00000001.json").write_text("{}")
    for words, said in (
        (("run", dataset), f"{dataset} is a committed dataset; .* `shardmill train {dataset}` trains on it"),
        (("etl", f"{dataset}@1"), "is a committed dataset"),
        (("inspect", "models"), "models holds models; .* `shardmill lineage models` shows"),
        (("predict", "models", "nope.jpg"), "nope.jpg does not exist; expected image files"),
    ):
        done = in_process(*words, cwd=tmp_path)
        # Nothing was loaded or begun.
        assert done.returncode == 2 and re.search(said, last_line(done)) and len(done.stderr.splitlines()) == 1


def test_a_report_is_of_a_run_that_worked_on_what_is_named(dataset: str, tmp_path: Path):
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{dataset}"\n')
    assert in_process("verify", "c.toml", "--workdir", "work", cwd=tmp_path).returncode == 0
    (tmp_path / "other").mkdir()
    for named, said in (("other", "did not work on .*/other"), ("work", "`shardmill report --workdir .*/work`")):
        done = in_process("report", named, "--workdir", "work", cwd=tmp_path)
        assert done.returncode == 2 and re.search(said, last_line(done))
    for named in ((), ("c.toml",), (dataset,)):
        assert in_process("report", *named, "--workdir", "work", cwd=tmp_path).returncode == 0


def test_rejects_are_named_and_nothing_new_is_said(tmp_path: Path):
    write_images(tmp_path / "photos", num_images=30)
    (tmp_path / "photos" / "class_0" / "x.png").write_bytes(b"no image")
    options = ("--set", "etl.image_size=16", "--workdir", "work", *BUILD_HERE)
    failed = in_process("etl", "photos", *options, "--set", "etl.max_reject_fraction=0", cwd=tmp_path)
    assert failed.returncode != 0
    rejects = in_process("inspect", "work/dataset", "--rejects", cwd=tmp_path)
    assert rejects.returncode == 0 and "no version, its builds failed" in rejects.stdout.splitlines()[0]
    assert "class_0/x.png" in rejects.stdout
    options = (*options, "--set", "etl.max_reject_fraction=0.5")
    first, again = (in_process("etl", "photos", *options, cwd=tmp_path) for _ in range(2))
    [row] = [line for line in first.stdout.splitlines() if line.startswith("rejected\t")]
    assert re.search(r"rejected\t\w+ 1; `shardmill inspect .*/work/dataset@1 --rejects` lists them", row)
    assert again.stdout.startswith("etl: nothing is new; the latest version stays\n") and row in again.stdout
    # Of a later version the drift was measured when it was made.
    write_images(tmp_path / "photos", num_images=33)
    later, again = (in_process("etl", "photos", *options, cwd=tmp_path) for _ in range(2))
    assert "\ndrift\t" in later.stdout and "nothing is new" in again.stdout and "\ndrift\t" not in again.stdout


@pytest.mark.parametrize("age", ["7", "soon", "-1d", "1w"])
def test_an_age_needs_a_unit(dataset: str, tmp_path: Path, age: str):
    refused = in_process("gc", dataset, f"--older-than={age}", cwd=tmp_path)
    assert refused.returncode == 2 and "expected a number with a unit" in last_line(refused)


def test_rollback_and_the_versions_that_inspect_lists(dataset: str, tmp_path: Path):
    machine("compact", dataset, cwd=tmp_path)
    done = machine("rollback", f"{dataset}@1", cwd=tmp_path)
    assert done == {"uri": dataset, "version": 3, "restored_version": 1, "is_new": True}
    assert not machine("rollback", f"{dataset}@1", cwd=tmp_path)["is_new"]
    machine("gc", dataset, "--keep", "1", "--older-than", "0", "--delete", cwd=tmp_path)
    listed = machine("inspect", dataset, "--versions", cwd=tmp_path)
    found = [(each["version"], each["operation"], each["parent_version"], each["is_expired"]) for each in listed]
    assert found == [
        (4, "expire", 3, False),
        (3, "rollback", 2, False),
        (2, "compact", 1, True),
        (1, "full", None, False),
    ]
    assert {each["num_accepted"] for each in listed} == {120}
    shown = in_process("inspect", dataset, "--versions", cwd=tmp_path).stdout
    assert "3\trollback to 1\t120 images" in shown and "2\tcompact after 1" in shown
    refused = in_process("rollback", dataset, cwd=tmp_path)
    assert refused.returncode == 2 and "names no version; expected DATASET@N" in last_line(refused)


def test_inspect_shows_how_two_versions_differ(dataset: str, tmp_path: Path):
    assert "no row was added" in in_process("inspect", dataset, "--diff", "1", cwd=tmp_path).stdout
    (tmp_path / "images" / "class_0" / "00003.png").unlink()
    make_dataset(tmp_path, num_images=0)
    found = machine("inspect", f"{dataset}@2", "--diff", "1", cwd=tmp_path)
    assert [(each["change"], each["source"], each["after"]) for each in found["rows"]] == [
        ("removed", "class_0/00003.png", None)
    ]
    assert [(each["change"], each["class_name"], each["num_rows"]) for each in found["counts"]] == [
        ("removed", "class_0", 1)
    ]
    assert "removed\tclass_0/00003.png" in in_process("inspect", dataset, "--diff", "1", cwd=tmp_path).stdout
    refused = in_process("inspect", dataset, "--diff", "1", "--files", cwd=tmp_path)
    assert refused.returncode == 2 and "exclude each other" in last_line(refused)


def test_gc_of_a_models_folder_lists_its_exports_and_trainings(tmp_path: Path):
    left = tmp_path / "models" / "trainings" / ".tmp-1"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    (tmp_path / "models" / "exports").mkdir()
    whole = tmp_path / "models" / "trainings" / "0" / "note"
    whole.parent.mkdir()
    whole.write_bytes(b"1")
    listed = machine("gc", "models", "--older-than", "0", cwd=tmp_path)
    assert (listed["deleted"], listed["expired_exports"], listed["expired_trainings"]) == (False, [], [])
    assert {each["kind"] for each in listed["files"]} == {"unpublished"} and left.exists()
    done = in_process("gc", "models", "--older-than", "0", "--delete", cwd=tmp_path)
    assert done.returncode == 0 and "exports that went" in done.stdout, done.stderr
    assert not left.exists() and whole.exists()


_SETTINGS = ("etl.engine=tests.extending_entries:NEW_ENGINE", "etl.image_size=16", "etl.unit_min_images=16")


def plan(folder: Path, *overrides: str, scheme: str = "") -> DryRun:
    before = sorted(folder.rglob("*"))
    found = dry_run(f"{scheme}{folder}/images", common(folder, *overrides))
    assert sorted(folder.rglob("*")) == before
    return found


def common(folder: Path, *overrides: str) -> Common:
    return Common((*_SETTINGS, *overrides), str(folder / "work"), "r", is_run_named=True, json=False, debug=False)


def build(folder: Path, scheme: str = "") -> None:
    given = common(folder)
    tree = load_pipeline(f"{scheme}{folder}/images", given.overrides, given.workdir)
    build_dataset(tree.part(EtlTree), run_id=uuid.uuid4().hex)


def of_dataset(found: DryRun) -> tuple[int | None, int, int, int]:
    return found.latest_version, found.num_unchanged, found.num_removed, found.num_to_process


def test_it_reports_what_would_stay_and_what_would_be_made(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    first = plan(tmp_path)
    assert of_dataset(first) == (None, 0, 0, 60) and first.num_units > 1
    build(tmp_path)
    same = plan(tmp_path)
    assert (*of_dataset(same), same.num_units) == (1, 60, 0, 0, 0)
    assert same.plan_digest == first.plan_digest
    rng = random.Random(1)
    files = sorted((tmp_path / "images").rglob("*.png"))
    files[0].unlink()
    paint(files[1], rng)
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    changed = plan(tmp_path)
    assert (*of_dataset(changed), changed.num_units) == (1, 58, 2, 2, 1)
    assert ("dataset", "version 1: 58 rows are reused, 2 are removed") in changed.rows()
    os.utime(files[2], ns=(1, 1))
    compared = plan(tmp_path, "etl.detect_changes=content")
    assert (*of_dataset(compared), compared.num_to_compare) == (1, 57, 1, 3, 2)
    assert of_dataset(plan(tmp_path)) == (1, 57, 3, 3)
    assert of_dataset(plan(tmp_path, "etl.image_size=8")) == (1, 0, 60, 60)
    assert of_dataset(plan(tmp_path, "etl.write_mode=append")) == (1, 60, 0, 3)
    outside = tmp_path / "images" / "class_0" / "link.png"
    outside.symlink_to("/etc/hostname")
    with pytest.raises(RejectLimitExceeded, match="etl.max_reject_fraction allows 0; nothing was published; fix the"):
        plan(tmp_path, "etl.max_reject_fraction=0")
    outside.unlink()
    for file in files[2:40]:
        file.unlink()
    with pytest.raises(StorageError, match="max_vanished_fraction"):
        plan(tmp_path)


def test_it_reads_no_image_and_reports_the_progress_of_the_listing(
    tmp_path, faulty: dict[str, Any], monkeypatch, capsys
):
    write_images(tmp_path / "images", num_images=60)
    # What is no image is told before the images.
    (tmp_path / "images" / "class_0" / "notes.txt").write_text("notes")
    read: list[str] = []

    def noted(store: FaultyStore, path: str) -> bytes:
        read.append(path)
        return store.sound.read(path)

    faulty["read"] = noted
    # Lines come after seconds; here from the second batch of the listing on.
    monkeypatch.setattr(progress, "PLAIN_LINE_SECONDS", 0.0)
    assert plan(tmp_path, scheme="faulty://").num_to_process == 60
    lines = capsys.readouterr().err.splitlines()
    assert "etl, listing: 61 inputs" in lines and not read
    build(tmp_path, scheme="faulty://")
    assert len(read) == 60
    assert plan(tmp_path, scheme="faulty://").num_unchanged == 60 and len(read) == 60
    # A size that is left open is that of the version, or what some of the images decide.
    assert plan(tmp_path, "etl.image_size=0", scheme="faulty://").num_unchanged == 60 and len(read) == 60
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    assert plan(tmp_path, "etl.image_size=0", scheme="faulty://").stored_as.startswith("32 x 32 x 3 (")
    assert 60 < len(read) <= 60 + 32


def test_it_says_what_would_be_decoded_again_and_keeps_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_images(tmp_path / "images", num_images=20)
    build(tmp_path)
    with pytest.raises(RejectLimitExceeded, match=r"20 of the 20 images .* because of the config \(etl.image_size 16"):
        plan(tmp_path, "etl.image_size=24", "etl.max_redecoded_fraction=0.9")
    assert plan(tmp_path, "etl.image_size=24").num_to_process == 20
    assert "20 of the 20 images of version 1 are decoded again, because of" in capsys.readouterr().err


OPTIONS = NormalizeOptions(image_size=32, color="gray", encoding="raw")
FOUND_WHILE_LISTING = {RejectReason.NOT_AN_IMAGE_NAME, RejectReason.DANGLING_SYMLINK}
DECODED = [odd_file for odd_file in odd_files() if odd_file.expected_reason not in FOUND_WHILE_LISTING]


def run(key: str, data: bytes) -> ImageSample | Rejection:
    return process_image(SourceImage(key=key, size_bytes=len(data)), data, OPTIONS)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoImages:
    return write_demo_images(tmp_path_factory.mktemp("demo"))


def test_the_folder_holds_every_digit_and_every_odd_file(demo: DemoImages) -> None:
    names = {
        os.path.relpath(os.path.join(folder, name), demo.folder)
        for folder, _, names in os.walk(demo.folder)
        for name in names
    }
    assert len(names) == demo.num_files
    assert demo.num_digits == 1797
    assert {odd_file.key for odd_file in demo.odd_files} <= names
    assert len(demo.odd_files) >= 16
    assert {path.name for path in demo.folder.iterdir() if path.is_dir()} == {str(digit) for digit in range(10)}
    assert {Path(name).suffix for name in names} >= {".png", ".jpg", ".gif"}
    assert not (demo.folder / "8/dangling.jpg").exists()


def test_writing_again_touches_no_file(demo: DemoImages) -> None:
    def stamps() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in demo.folder.rglob("*")}

    before = stamps()
    assert write_demo_images(demo.folder) == demo
    assert stamps() == before


def test_the_other_odd_files_are_refused_while_listing(demo: DemoImages) -> None:
    listing = list_images(SourceConfig(uri=str(demo.folder)), OPTIONS.max_source_bytes)
    expected = {f.key: f.expected_reason for f in odd_files() if f.expected_reason in FOUND_WHILE_LISTING}
    assert {rejection.key: rejection.reason for rejection in listing.rejections} == expected
    assert listing.num_images + len(listing.rejections) == demo.num_files
    assert all(image.label == image.key[0] for image in images_of(listing))


@pytest.mark.parametrize("odd_file", DECODED, ids=lambda odd_file: odd_file.key)
def test_each_odd_file_meets_its_fate(odd_file: OddFile) -> None:
    assert odd_file.data is not None
    result = run(odd_file.key, odd_file.data)
    if odd_file.expected_reason is not None:
        assert isinstance(result, Rejection), result
        assert result.reason is odd_file.expected_reason
        return
    assert isinstance(result, ImageSample), result
    assert result.notes == (() if odd_file.expected_note is None else (odd_file.expected_note,))


@pytest.mark.parametrize("odd_file", [f for f in DECODED if f.expected_reason is None], ids=lambda f: f.key)
def test_accepted_odd_files_show_the_digit_of_their_folder(odd_file: OddFile) -> None:
    assert odd_file.data is not None
    result = run(odd_file.key, odd_file.data)
    assert isinstance(result, ImageSample)
    shown_HW = decode_stored(result.image, "raw", OPTIONS.image_shape_HWC)[:, :, 0].astype(int)
    digits = load_digits()
    label = int(odd_file.key[0])
    assert digits.labels[label] == label
    errors = [float(np.abs(shown_HW - image_HW).mean()) for image_HW in digits.images]
    assert errors[label] < 2
    assert digits.labels[int(np.argmin(errors))] == label


def test_the_digits_decode_to_themselves() -> None:
    digits = load_digits()
    for index in (0, 1, 500, 1001, 1796):
        result = run(digit_key(digits, index), encode_digit(digits, index))
        assert isinstance(result, ImageSample)
        assert result.notes == ()
        shown_HW = decode_stored(result.image, "raw", OPTIONS.image_shape_HWC)[:, :, 0].astype(int)
        assert np.abs(shown_HW - digits.images[index]).mean() < 2


def test_without_scikit_learn_as_many_digits_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    drawn = load_digits.__wrapped__()
    assert (drawn.kind, drawn.labels[:10]) == ("drawn", tuple(range(10)))
    assert len({image_HW.tobytes() for image_HW in drawn.images}) == len(load_digits().images)
    assert all(image_HW.shape == (32, 32) and image_HW.max() > 200 for image_HW in drawn.images)


def test_odd_files_are_the_same_bytes_every_time() -> None:
    first = odd_files()
    odd_files.cache_clear()
    assert odd_files() == first


def test_every_reason_a_user_may_meet_first_is_on_show() -> None:
    shown = {odd_file.expected_reason for odd_file in odd_files()}
    assert shown >= {
        None, RejectReason.EMPTY_FILE, RejectReason.NOT_AN_IMAGE, RejectReason.TRUNCATED, RejectReason.CORRUPT_SCAN,
        RejectReason.CHECKSUM, RejectReason.TOO_MANY_PIXELS, RejectReason.DANGLING_SYMLINK,
        RejectReason.NOT_AN_IMAGE_NAME,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With two versions, the second of which has lost a shard, and a config."""
    make_dataset(tmp_path, num_images=60)
    first = set((tmp_path / "dataset").rglob("shards/*/*"))
    make_dataset(tmp_path, num_images=90)
    for shard in set((tmp_path / "dataset").rglob("shards/*/*")) - first:
        shard.unlink()
    (tmp_path / "c.toml").write_text(
        f'[dataset]\nuri = "{tmp_path}/dataset"\n[train]\nepochs = 1\nglobal_batch_size = 16\n'
    )
    return tmp_path


def run_verified(folder: Path, command: str, *arguments: str, expected: int = 0) -> str:
    done = in_process(command, "c.toml", "--workdir", "work", "--run-id", "r", *arguments, cwd=folder)
    assert done.returncode == expected, done.stderr
    return done.stderr


def summary(folder: Path) -> dict:
    return json.loads((folder / "work/runs/r/summary.json").read_text())


@pytest.mark.timeout(300)
def test_a_version_that_verify_was_given_is_checked_trained_on_and_evaluated(folder: Path):
    run_verified(folder, "verify", expected=3)
    run_verified(folder, "verify", "--dataset-version", "1")
    assert summary(folder)["dataset"]["version"] == 1
    run_verified(folder, "train")
    run_verified(folder, "gate")
    run_verified(folder, "evaluate")
    found = summary(folder)
    assert (found["dataset"]["version"], found["exit_code"]) == (1, 0)
    [training] = (folder / "work/models/trainings").rglob("result.json")
    assert training.parents[1].name.startswith("v00000001-")
    # A run of its own that evaluates keeps the training, which a report then shows.
    asked = ("evaluate", "c.toml", f"--set=dataset.uri={folder}/dataset@1", "--workdir", "work", "--run-id", "alone")
    assert in_process(*asked, cwd=folder).returncode == 0
    alone = json.loads((folder / "work/runs/alone/summary.json").read_text())
    assert {name: each["status"] for name, each in alone["stages"].items()} == dict.fromkeys(alone["stages"], "skipped")
    assert alone["train"]["weights_sha256"] == found["train"]["weights_sha256"] and [*alone["stages"]] == [
        "train",
        "evaluate",
    ]
    assert len(gather(folder / "work", "alone", alone).history) == 1
    # Asked again, without a version, the check is of the latest: an earlier answer is not repeated.
    run_verified(folder, "verify", expected=3)


def test_an_invalid_version_is_named_in_the_error(folder: Path):
    assert "has no version 7" in run_verified(folder, "verify", "--dataset-version", "7", expected=2)
    assert "--dataset-version" in run_verified(folder, "verify", "--dataset-version", "-1", expected=2)
    done = in_process("verify", f"{folder}/dataset", "--dataset-version", "1", "--json", cwd=folder)
    assert (done.returncode, json.loads(done.stdout)["version"]) == (0, 1)


GOOD = Prediction("a.png", "cat", 0.75, "", (Guess("cat", 0.75), Guess("dog", 0.25)))
HOSTILE = Prediction("=cmd|' /C calc'!A0.png", "@SUM(1)", 0.5, "", (Guess("@SUM(1)", 0.5), Guess("+1", 0.5)))
BAD = Prediction("-b,\n.png", "", 0.0, "missing: no such file")


def test_no_cell_of_the_csv_is_a_formula():
    header, *rows = csv.reader(io.StringIO(prediction_csv([GOOD, HOSTILE, BAD])))
    assert header == ["path", "rejection", "label", "probability", "label_2", "probability_2"]
    assert rows[0] == ["a.png", "", "cat", "0.750000", "dog", "0.250000"]
    assert rows[1] == ["'=cmd|' /C calc'!A0.png", "", "'@SUM(1)", "0.500000", "'+1", "0.500000"]
    assert rows[2] == ["'-b,\n.png", "missing: no such file", "", "", "", ""]


def test_a_path_that_is_not_utf8_is_shown_by_its_bytes():
    unreadable = Prediction("bad\udcff.png", "", 0.0, "missing: no such file")
    assert r"bad\xff.png" in prediction_csv([unreadable])
    with pytest.raises(UsageError, match=r"bad\\xff\.png"):
        check_any_predicted([unreadable])


def test_people_see_one_row_a_file():
    assert prediction_rows([GOOD, BAD]) == [
        ("a.png", "cat", "0.7500", "dog", "0.2500"),
        ("-b,\n.png", "missing: no such file", "", "", ""),
    ]
    assert prediction_rows([BAD]) == [("-b,\n.png", "missing: no such file", "")]


def test_nothing_but_rejections_is_an_error():
    check_any_predicted([BAD, GOOD])
    with pytest.raises(UsageError, match=r"none of 2 file\(s\) .* missing: no such file"):
        check_any_predicted([BAD, BAD])


def test_a_batch_job_prints_no_csv(tmp_path: Path):
    job = ("predict", str(tmp_path), "images", "--out", "folder", "--csv", "--json")
    refused = CliRunner().invoke(app, job)
    assert refused.exit_code == 2 and "--csv with --out" in json.loads(refused.stdout)["error"]["message"]


@pytest.fixture(scope="module")
def drifting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, the second without one of the three classes; and a third one with the rows of the second."""
    drifting = tmp_path_factory.mktemp("drift")
    make_dataset(drifting, num_images=90)
    shutil.rmtree(drifting / "images" / "class_1")
    make_dataset(drifting, num_images=0)
    compact_dataset(open_dataset(str(drifting / "dataset")), "r")
    (drifting / "c.toml").write_text(f'[dataset]\nuri = "{drifting}/dataset"\n[etl]\nmax_drift = 0.2\n')
    return drifting


def test_a_version_is_shown_beside_the_one_before_or_any_other(drifting: Path):
    done = in_process("drift", drifting / "dataset@2", "--json", cwd=drifting)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and (found["version"], found["against_version"], found["ok"]) == (2, 1, True)
    assert found["amount"] == max(each["amount"] for each in found["aspects"])
    [shares] = [each for each in found["aspects"] if each["aspect"] == "class_shares"]
    assert shares["amount"] == pytest.approx(1 / 3)
    assert shares["figures"][0] == {"name": "class_1", "before": pytest.approx(1 / 3), "after": 0.0}
    # The third holds the second's rows; nothing is before the first.
    third = json.loads(in_process("drift", drifting / "dataset", "--json", cwd=drifting).stdout)
    assert (third["version"], third["against_version"], third["aspects"]) == (3, 1, found["aspects"])
    assert "version 1 is the first" in in_process("drift", drifting / "dataset@1", cwd=drifting).stdout
    back = in_process("drift", drifting / "dataset@1", "--against", "2", cwd=drifting).stdout
    assert "dataset@1 against @2" in back and "class_1 0.0% -> 33.3%" in back
    shutil.copytree(drifting / "dataset", drifting / "other", dirs_exist_ok=True)
    other = in_process("drift", drifting / "dataset@1", "--against", drifting / "other@1", cwd=drifting).stdout
    assert f"against {drifting}/other@1" in other and "class shares\t0.000" in other


def test_a_limit_ends_with_7_behind_the_table(drifting: Path):
    done = in_process("drift", drifting / "dataset@2", "--max-drift", "0.1", cwd=drifting)
    assert done.returncode == 7 and "class shares\t0.333" in done.stdout
    assert last_line(done).startswith("ERROR 7: ") and "class_1 33.3% -> 0.0%" in last_line(done)
    assert "--diff 1` lists the rows" in last_line(done)
    as_document = in_process("drift", drifting / "dataset@2", "--max-drift", "0.1", "--json", cwd=drifting)
    assert as_document.returncode == 7 and not json.loads(as_document.stdout)["ok"]
    absent = in_process("drift", drifting / "dataset", "--against", "7", cwd=drifting)
    assert absent.returncode == 2 and "has no version 7" in last_line(absent)
    assert in_process("drift", drifting / "dataset", "--max-drift", "2", cwd=drifting).returncode == 2


def test_predictions_have_no_drift(drifting: Path):
    predict_pixels(open_dataset(str(drifting / "dataset@1")), drifting / "predictions")
    for arguments in (
        (drifting / "predictions",),
        (drifting / "dataset", "--against", drifting / "predictions"),
    ):
        refused = in_process("drift", *arguments, cwd=drifting)
        assert refused.returncode == 2 and not refused.stdout
        assert "predictions@1 holds predictions" in last_line(refused)
        assert "compare the datasets that were predicted" in last_line(refused)


def test_with_a_config_it_is_a_stage_of_the_run(drifting: Path):
    arguments = ["c.toml", "--workdir", "work", "--run-id", "r"]
    refused = in_process("drift", *arguments, "--dataset-version", "2", cwd=drifting)
    summary = json.loads((drifting / "work/runs/r/summary.json").read_text())
    assert (refused.returncode, summary["exit_code"], summary["stages"]["drift"]["status"]) == (7, 7, "failed")
    assert "class shares 0.333 (class_1 33.3% -> 0.0%" in summary["error"]
    assert in_process("report", *arguments, cwd=drifting).returncode == 0
    assert "class_1 33.3% -&gt; 0.0%" in (drifting / "work/runs/r/report.html").read_text()

    passed = in_process("drift", *arguments, "--dataset-version", "2", "--set=etl.max_drift=1", cwd=drifting)
    summary = json.loads((drifting / "work/runs/r/summary.json").read_text())
    assert passed.returncode == 0 and summary["drift"]["amount"] > 0.3
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    # A version that is named in the config, in place of the one before.
    same = in_process("drift", *arguments, "--dataset-version", "2", "--set=etl.drift_baseline=2", cwd=drifting)
    assert same.returncode == 0 and "against @2" in same.stdout
