"""Which images of a source are new or changed, since which version, and how far they drifted."""

from __future__ import annotations

import csv
import os
import random
import re
import shutil
import tarfile
import uuid
from pathlib import Path

import cv2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset, stage_record
from etl.plan import plan_build
from etl.units.write_unit import Decoders, write_unit
from shardmill.data_quality.drift import Drift
from shardmill.dataset.build import PENDING
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import DriftLimitExceeded, RejectLimitExceeded, StorageError, UsageError
from shardmill.images.sandbox import DecodeSandbox
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from tests.etl.incremental import CONFIG, build, opened, paint, tree_for
from tests.lab.datasets import HERE, write_images


def _touch(folder: Path, num_files: int, mtime_ns: int = 1) -> list[Path]:
    touched = sorted((folder / "images").rglob("*.png"))[:num_files]
    for file in touched:
        os.utime(file, ns=(mtime_ns, mtime_ns))
    return touched


def test_touched_files_are_read_once_and_never_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=40)
    first = build(tmp_path)
    _touch(tmp_path, 5)
    # With an image to decode its child would be started, and end.
    no_child = DecodeSandbox(entry="nothing.there:at_all")
    monkeypatch.setattr("etl.units.write_unit.sandboxes_of_process", lambda config: Decoders(no_child, no_child))
    touched = build(tmp_path, detect_changes="content")
    assert (touched.manifest.version, touched.num_images_read) == (1, 5)
    again = build(tmp_path, detect_changes="content")
    assert (again.manifest.version, again.num_images_read) == (1, 0)
    assert again.manifest == first.manifest


@pytest.mark.parametrize("num_removed", [0, 3])
def test_the_next_version_remembers_the_times_of_what_was_touched(num_removed: int, tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    build(tmp_path)
    touched = _touch(tmp_path, 20)
    for file in touched[:num_removed]:
        file.unlink()
    rng = random.Random(1)
    paint(touched[5], rng)
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    changed = build(tmp_path, detect_changes="content")
    assert (changed.manifest.version, changed.num_images_read) == (2, 21 - num_removed)
    assert changed.manifest.content_digest == build(tmp_path, "whole").manifest.content_digest
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()
    # Only what is new since: the touched ones are known with their new times now.
    paint(tmp_path / "images" / "class_0" / "newer.png", rng)
    assert build(tmp_path, detect_changes="content").num_images_read == 1


def test_a_file_that_is_listed_by_name_alone_is_compared_by_its_bytes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    lines = [f"{file},{file.parent.name}\n" for file in files]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(lines))
    tree = tree_for(
        tmp_path, source=SourceConfig(uri=str(tmp_path / "table.csv"), kind="table"), detect_changes="content"
    )
    first = build_dataset(tree, run_id="1").manifest
    # Their bytes may be others each time: that they were read says nothing of the next run.
    for run_id in ("same", "same again"):
        same = build_dataset(tree, run_id=run_id)
        assert (same.manifest.version, same.num_images_read) == (1, 30)
    paint(files[3], random.Random(1))
    by_name = tree.model_copy(update={"etl": CONFIG})
    assert build_dataset(by_name, run_id="2").skipped
    outcome = build_dataset(tree, run_id="3")
    assert (outcome.manifest.version, outcome.num_images_read) == (2, 30)
    assert outcome.manifest.content_digest != first.content_digest


def test_the_rows_of_an_archive_that_was_packed_again_stay(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)

    def pack() -> None:
        with tarfile.open(tmp_path / "images.tar", "w") as archive:
            for file in sorted((tmp_path / "images").rglob("*.png")):
                archive.add(file, file.relative_to(tmp_path / "images").as_posix())

    pack()
    tree = tree_for(
        tmp_path, source=SourceConfig(uri=str(tmp_path / "images.tar"), kind="webdataset"), detect_changes="content"
    )
    build_dataset(tree, run_id="1")
    before = {shard.path for shard in opened(tmp_path).shards}
    paint(tmp_path / "images" / "class_0" / "0.png", random.Random(1))
    pack()
    assert build_dataset(tree, run_id="2").manifest.version == 2
    assert before < {shard.path for shard in opened(tmp_path).shards}
    verify_dataset(opened(tmp_path), deep=True).raise_if_failed()


def test_rows_of_a_table_that_names_some_splits_are_not_read_again(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    table = tmp_path / "table.csv"

    def name_splits(*names: str) -> None:
        named = dict(zip(files, names, strict=False))
        lines = [f"{file},{file.parent.name},{named.get(file, '')}\n" for file in files]
        table.write_text("uri,label,split\n" + "".join(lines))

    name_splits("test", "train", "validation")
    tree = tree_for(tmp_path, source=SourceConfig(uri=str(table), kind="table"))
    build_dataset(tree, run_id="1")
    # The second is decided by its content from now on, the fourth is not any more.
    name_splits("test", "", "validation", "validation")
    outcome = build_dataset(tree, run_id="2")
    assert outcome.num_images_read <= 2
    whole = tree.model_copy(update={"dataset": DatasetConfig(uri=str(tmp_path / "whole"))})
    assert outcome.manifest.content_digest == build_dataset(whole, run_id="3").manifest.content_digest


def test_a_source_that_lost_most_of_its_images_replaces_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path)
    files = sorted((tmp_path / "images").rglob("*.png"))
    rng = random.Random(1)
    for file in files[:15]:
        file.unlink()
    for file in files[15:]:
        # Changed, and there: none of them has vanished.
        paint(file, rng)
    assert build(tmp_path).manifest.counts.accepted == 15
    for file in files[15:23]:
        file.unlink()
    paint(tmp_path / "images" / "class_0" / "new.png", rng)
    for change in ({}, {"image_size": 8}):
        with pytest.raises(StorageError, match=r"8 of the 15 images of version 2 .*max_vanished_fraction allows 0.5"):
            build(tmp_path, **change)
        assert opened(tmp_path).manifest.version == 2
    assert build(tmp_path, max_vanished_fraction=0.6).manifest.counts.accepted == 8


def test_a_change_behind_a_copy_that_is_dropped_again_is_noticed(tmp_path: Path):
    """The commit itself finds the parent again, because the copy was read and refused as it was before."""
    write_images(tmp_path / "images", num_images=30)
    files = sorted((tmp_path / "images").rglob("*.png"))
    shutil.copy(files[0], tmp_path / "images" / "z_copy.png")
    rows = [(file, file.parent.name) for file in files] + [(tmp_path / "images" / "z_copy.png", files[0].parent.name)]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(f"{file},{label}\n" for file, label in rows))
    tree = tree_for(
        tmp_path,
        source=SourceConfig(uri=str(tmp_path / "table.csv"), kind="table"),
        detect_changes="content",
        duplicates="drop",
    )
    build_dataset(tree, run_id="1")
    assert build_dataset(tree, run_id="2").manifest.version == 1
    assert list((tmp_path / "dataset" / PENDING).glob("*")) == []
    paint(files[5], random.Random(1))
    changed = build_dataset(tree, run_id="3").manifest
    assert changed.version == 2
    whole = tree.model_copy(update={"dataset": DatasetConfig(uri=str(tmp_path / "whole"))})
    assert changed.content_digest == build_dataset(whole, run_id="4").manifest.content_digest


_ETL = EtlConfig(engine=HERE, image_size=8, encoding="png", max_reject_fraction=1)


def tree_of(folder: Path, source: SourceConfig, dataset: str = "dataset", **etl: object) -> EtlTree:
    settings = EtlConfig(**{**_ETL.model_dump(exclude_defaults=True), **etl})
    return EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / dataset)), etl=settings)


def build_versions_of_sources(
    folder: Path, source: SourceConfig, dataset: str = "dataset", **etl: object
) -> BuildOutcome:
    return build_dataset(tree_of(folder, source, dataset, **etl), run_id=uuid.uuid4().hex)


def write_table(folder: Path, num_images: int = 6, seed: int = 0, columns: dict[str, list[str]] | None = None):
    """A table of relative names: `0.png`, `1.png`, ..."""
    write_images(folder / "files", num_images=num_images, num_classes=2, seed=seed)
    for number, file in enumerate(sorted((folder / "files").rglob("*.png"))):
        file.rename(folder / f"{number}.png")
    rows = [{"uri": f"{number}.png", "label": f"c{number % 2}"} for number in range(num_images)]
    for name, values in (columns or {}).items():
        for row, value in zip(rows, values, strict=False):
            row[name] = value
    with open(folder / "t.csv", "w", newline="") as out:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return SourceConfig(uri=str(folder / "t.csv"), kind="table")


def test_equal_names_in_another_place_are_not_taken_for_equal_images(tmp_path: Path):
    monday, tuesday = (write_table(tmp_path / day, seed=seed) for seed, day in enumerate(("mon", "tue")))
    build_versions_of_sources(tmp_path, monday)
    with pytest.raises(UsageError, match="with other bytes"):
        build_versions_of_sources(tmp_path, tuesday, write_mode="append")
    with pytest.raises(UsageError, match="was built from"):
        build_versions_of_sources(tmp_path, tuesday)
    replaced = build_dataset(tree_of(tmp_path, tuesday), run_id="r", replace_source=True)
    assert (
        replaced.manifest.content_digest
        == build_versions_of_sources(tmp_path, tuesday, "fresh").manifest.content_digest
    )


def test_a_killed_runs_units_are_not_committed_for_another_source(tmp_path: Path):
    monday, tuesday = (write_table(tmp_path / day, seed=seed) for seed, day in enumerate(("mon", "tue")))
    plan = plan_build(tree_of(tmp_path, monday), run_id="killed")
    for unit in plan.units:
        write_unit(unit, plan.task)
    built = build_versions_of_sources(tmp_path, tuesday)
    assert built.num_units_kept == 0
    assert (
        built.manifest.content_digest == build_versions_of_sources(tmp_path, tuesday, "fresh").manifest.content_digest
    )


def test_splits_that_are_named_no_more_are_decided_by_content(tmp_path: Path):
    build_versions_of_sources(tmp_path, write_table(tmp_path / "a", 20, columns={"split": ["test"] * 20}))
    shutil.rmtree(tmp_path / "a" / "files")
    unnamed = write_table(tmp_path / "a", 20)
    again = build_versions_of_sources(tmp_path, unnamed).manifest
    assert again.content_digest == build_versions_of_sources(tmp_path, unnamed, "fresh").manifest.content_digest
    assert again.counts.by_split["train"] > 5


def test_a_class_without_images_that_is_added_to_the_label_map_makes_a_version(tmp_path: Path):
    source = write_table(tmp_path / "a")
    build_versions_of_sources(tmp_path, source, label_map=("c0", "c1"))
    assert build_versions_of_sources(tmp_path, source, label_map=("c0", "c1", "z")).manifest.class_names == (
        "c0",
        "c1",
        "z",
    )
    assert build_versions_of_sources(tmp_path, source, label_map=("c0", "c1", "z")).skipped


def test_cells_that_are_no_numbers_are_rejections(tmp_path: Path):
    sizes = ["", "12.5", "abc", "9" * 20, "-5"]
    with pytest.raises(RejectLimitExceeded):
        build_versions_of_sources(
            tmp_path, write_table(tmp_path / "a", columns={"size_bytes": sizes}), max_reject_fraction=0
        )
    manifest = build_versions_of_sources(
        tmp_path, SourceConfig(uri=str(tmp_path / "a" / "t.csv"), kind="table")
    ).manifest
    assert (manifest.counts.accepted, manifest.counts.by_reason) == (2, {"bad_row": 4})


@pytest.fixture
def parts(tmp_path: Path) -> dict[str, SourceConfig]:
    for seed, name in enumerate("abc"):
        write_images(tmp_path / name, num_images=5, num_classes=2, seed=seed)
        for file in sorted((tmp_path / name).rglob("*.png")):
            file.rename(file.with_name(f"{name}-{file.name}"))
    return {name: SourceConfig(uri=str(tmp_path / name)) for name in "abc"}


def several(parts: dict[str, SourceConfig], names: str) -> SourceConfig:
    return SourceConfig(kind="several", parts={name: parts[name] for name in names})


def test_a_part_is_dropped_only_when_that_is_declared(tmp_path: Path, parts: dict[str, SourceConfig]):
    build_versions_of_sources(tmp_path, several(parts, "abc"))
    with pytest.raises(UsageError, match="was built from a .*, b .*, c .*, not from a"):
        build_versions_of_sources(tmp_path, several(parts, "a"))
    build_versions_of_sources(tmp_path, several(parts, "ab"), "other")
    added = build_versions_of_sources(tmp_path, several(parts, "bc"), "other", write_mode="append").manifest
    assert added.counts.accepted == 15 and [each.uri for each in added.other_sources] == ["a, b"]
    with pytest.raises(UsageError, match="would only hold those of"):
        build_versions_of_sources(tmp_path, several(parts, "bc"), "other")


def test_an_append_has_labels_or_none_as_the_rows_that_are_there(tmp_path: Path, parts: dict[str, SourceConfig]):
    (tmp_path / "flat").mkdir()
    for number, file in enumerate(sorted((tmp_path / "a").rglob("*.png"))):
        shutil.copy(file, tmp_path / "flat" / f"{number}.png")
    names = ("class_0", "class_1")
    build_versions_of_sources(tmp_path, SourceConfig(uri=str(tmp_path / "flat")), label_map=names)
    with pytest.raises(UsageError, match="would have other labels"):
        build_versions_of_sources(tmp_path, parts["b"], label_map=names, write_mode="append")


def test_an_append_of_what_was_appended_before_makes_no_version(tmp_path: Path, parts: dict[str, SourceConfig]):
    copy = sorted((tmp_path / "a").rglob("*.png"))[0]
    shutil.copy(copy, copy.with_name("z.png"))
    for name in "ab":
        build_versions_of_sources(tmp_path, parts[name], write_mode="append", duplicates="drop")
    build_versions_of_sources(tmp_path, parts["a"], write_mode="append", duplicates="drop")
    assert open_dataset(str(tmp_path / "dataset")).pin.version == 2
    with pytest.raises(UsageError, match="would have other duplicates"):
        build_versions_of_sources(tmp_path, parts["c"], write_mode="append")


def test_a_repaired_archive_leaves_the_ledger(tmp_path: Path, parts: dict[str, SourceConfig]):
    shutil.make_archive(str(tmp_path / "zips" / "a_whole"), "zip", tmp_path / "a")
    shutil.make_archive(str(tmp_path / "zips" / "cut"), "zip", tmp_path / "b")
    cut = tmp_path / "zips" / "cut.zip"
    data = cut.read_bytes()
    cut.write_bytes(data[:-40])
    source = SourceConfig(uri=str(tmp_path / "zips"), kind="zip")
    build_versions_of_sources(tmp_path, source, write_mode="append")
    dataset = open_dataset(str(tmp_path / "dataset"))
    assert [each.key for each in read_rejections(dataset.store, dataset.manifest)] == ["cut.zip"]
    cut.write_bytes(data)
    manifest = build_versions_of_sources(tmp_path, source, write_mode="append").manifest
    assert (manifest.counts.listed, manifest.counts.accepted, manifest.counts.rejected) == (10, 10, 0)


def test_so_does_a_repaired_file_of_rows_with_keys_of_their_own(tmp_path: Path, parts: dict[str, SourceConfig]):
    (tmp_path / "rows").mkdir()
    for name in "ab":
        files = sorted((tmp_path / name).rglob("*.png"))
        columns = {"id": [file.stem for file in files], "label": [file.parent.name for file in files]}
        table = pa.table({**columns, "image": [file.read_bytes() for file in files]})
        pq.write_table(table, tmp_path / "rows" / f"{name}.parquet")
    data = (tmp_path / "rows" / "b.parquet").read_bytes()
    (tmp_path / "rows" / "b.parquet").write_bytes(data[:-40])
    source = SourceConfig(uri=str(tmp_path / "rows"), kind="parquet", key_field="id")
    assert build_versions_of_sources(tmp_path, source, write_mode="append").manifest.counts.by_reason == {
        "damaged_container": 1
    }
    (tmp_path / "rows" / "b.parquet").write_bytes(data)
    manifest = build_versions_of_sources(tmp_path, source, write_mode="append").manifest
    assert (manifest.counts.listed, manifest.counts.accepted, manifest.counts.rejected) == (10, 10, 0)
    verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).raise_if_failed()


def test_a_lost_shard_moves_no_image_between_stratified_splits(tmp_path: Path, parts: dict[str, SourceConfig]):
    write_images(tmp_path / "many", num_images=40, num_classes=2)
    source = SourceConfig(uri=str(tmp_path / "many"))
    before = build_versions_of_sources(tmp_path, source).manifest
    for file in (tmp_path / "dataset" / "shards" / "test").glob("*.parquet"):
        file.unlink()
    after = build_versions_of_sources(tmp_path, source, stratified_splits=True).manifest
    assert after.counts.by_split == before.counts.by_split
    with pytest.raises(ValueError, match="not both"):
        tree_of(tmp_path, source, stratified_splits=True, write_mode="append")


def test_a_source_that_was_appended_to_is_not_overwritten_unasked(tmp_path: Path, parts: dict[str, SourceConfig]):
    build_versions_of_sources(tmp_path, parts["a"])
    build_versions_of_sources(tmp_path, parts["b"], write_mode="append")
    for name, other in (("a", "b"), ("b", "a")):
        with pytest.raises(UsageError, match=f"also holds images of .*/{other}; .*append.*those of .*/{name}"):
            build_versions_of_sources(tmp_path, parts[name])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of each of three classes 30 images, in a first version."""
    write_images(tmp_path / "images", num_images=90)
    build(tmp_path, max_drift=0.0)
    return tmp_path


def test_a_darkened_folder_is_refused_until_it_is_accepted(folder: Path):
    for file in (folder / "images" / "class_1").glob("*.png"):
        assert cv2.imwrite(str(file), cv2.convertScaleAbs(cv2.imread(str(file)), alpha=0.2))
    with pytest.raises(DriftLimitExceeded) as caught:
        build(folder, max_drift=0.1)
    assert caught.value.exit_code == 7 and not caught.value.is_worth_retrying
    line = str(caught.value)
    assert re.search(r"drifted by 0\.\d+ from @1: pixels 0\.\d+ \(green mean [\d.]+ -> [\d.]+", line)
    assert "class shares" not in line and "etl.max_drift allows 0.1; nothing was published" in line
    assert latest_version(open_store(folder / "dataset")) == 1
    assert Drift.model_validate(caught.value.detail["drift"]).above(0.1)

    # Accepted once: no image is read again. The version is what the next one is compared with.
    accepted = build(folder, max_drift=1.0)
    assert (accepted.manifest.version, accepted.num_images_read) == (2, 0)
    section = stage_record(accepted, tree_for(folder)).sections["drift"]
    assert Drift.model_validate(section).above(0.1) and section["against_version"] == 1
    write_images(folder / "more", num_images=3, seed=1)
    for number in range(3):
        shutil.move(next((folder / "more" / f"class_{number}").iterdir()), folder / f"images/class_{number}/new.png")
    assert build(folder, max_drift=0.1).manifest.version == 3


def test_a_class_that_has_vanished_is_named_with_its_share(folder: Path):
    shutil.rmtree(folder / "images" / "class_2")
    with pytest.raises(DriftLimitExceeded, match=r"class shares 0\.333 \(class_2 33\.3% -> 0\.0%"):
        build(folder, max_drift=0.3)
    assert build(folder, max_drift=0.55).manifest.counts.accepted == 60


def test_what_has_not_changed_has_no_drift_and_passes_any_limit(folder: Path):
    outcome = build(folder, max_drift=0.0)
    assert outcome.skipped and stage_record(outcome, tree_for(folder)).sections["drift"] is None
    # A copy of every image at twice the size: neither the classes nor the pixels have changed, the sizes have.
    for file in [*(folder / "images").rglob("*.png")]:
        assert cv2.imwrite(str(file), cv2.imread(str(file)).repeat(2, axis=0).repeat(2, axis=1))
    with pytest.raises(DriftLimitExceeded, match=r"source sizes 1\.000 \(16-31 100\.0% -> 0\.0%, 32-63") as caught:
        build(folder, max_drift=0.1)
    assert "class shares" not in str(caught.value)


def test_a_slow_slide_is_seen_against_a_named_version(folder: Path):
    for number in range(2, 4):
        for file in sorted((folder / "images" / "class_0").iterdir())[:8]:
            file.unlink()
        slid = build(folder, max_drift=0.1, drift_baseline=0)
        assert slid.manifest.version == number
    sorted((folder / "images" / "class_0").iterdir())[0].unlink()
    with pytest.raises(DriftLimitExceeded, match=r"from @1: class shares .* set etl.drift_baseline to the new version"):
        build(folder, max_drift=0.1, drift_baseline=1)
    with pytest.raises(UsageError, match=r"etl.drift_baseline = 9: .* has no version 9; expected one of 1 to 3"):
        build(folder, max_drift=0.1, drift_baseline=9)
    assert build(folder, max_drift=0.1).manifest.version == 4
