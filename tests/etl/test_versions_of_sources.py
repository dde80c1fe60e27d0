"""A later build takes for unchanged only what is, however its source, the place or what it says of images changes."""

from __future__ import annotations

import csv
import shutil
import uuid
from pathlib import Path

import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.outcome import BuildOutcome
from etl.plan import plan_build
from etl.units.write_unit import write_unit
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.open import open_dataset
from shardmill.errors import RejectLimitExceeded, UsageError
from shardmill.jobs.config import DatasetConfig
from tests.lab.datasets import HERE, write_images

_ETL = EtlConfig(engine=HERE, image_size=8, encoding="png", max_reject_fraction=1)


def tree_of(folder: Path, source: SourceConfig, dataset: str = "dataset", **etl: object) -> EtlTree:
    settings = EtlConfig(**{**_ETL.model_dump(exclude_defaults=True), **etl})
    return EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / dataset)), etl=settings)


def build(folder: Path, source: SourceConfig, dataset: str = "dataset", **etl: object) -> BuildOutcome:
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
    build(tmp_path, monday)
    with pytest.raises(UsageError, match="with other bytes"):
        build(tmp_path, tuesday, write_mode="append")
    with pytest.raises(UsageError, match="was built from"):
        build(tmp_path, tuesday)
    replaced = build_dataset(tree_of(tmp_path, tuesday), run_id="r", replace_source=True)
    assert replaced.manifest.content_digest == build(tmp_path, tuesday, "fresh").manifest.content_digest


def test_a_killed_runs_units_are_not_committed_for_another_source(tmp_path: Path):
    monday, tuesday = (write_table(tmp_path / day, seed=seed) for seed, day in enumerate(("mon", "tue")))
    plan = plan_build(tree_of(tmp_path, monday), run_id="killed")
    for unit in plan.units:
        write_unit(unit, plan.task)
    built = build(tmp_path, tuesday)
    assert built.num_units_kept == 0
    assert built.manifest.content_digest == build(tmp_path, tuesday, "fresh").manifest.content_digest


def test_splits_that_are_named_no_more_are_decided_by_content(tmp_path: Path):
    build(tmp_path, write_table(tmp_path / "a", 20, columns={"split": ["test"] * 20}))
    shutil.rmtree(tmp_path / "a" / "files")
    unnamed = write_table(tmp_path / "a", 20)
    again = build(tmp_path, unnamed).manifest
    assert again.content_digest == build(tmp_path, unnamed, "fresh").manifest.content_digest
    assert again.counts.by_split["train"] > 5


def test_a_class_without_images_that_is_added_to_the_label_map_makes_a_version(tmp_path: Path):
    source = write_table(tmp_path / "a")
    build(tmp_path, source, label_map=("c0", "c1"))
    assert build(tmp_path, source, label_map=("c0", "c1", "z")).manifest.class_names == ("c0", "c1", "z")
    assert build(tmp_path, source, label_map=("c0", "c1", "z")).skipped


def test_cells_that_are_no_numbers_are_rejections(tmp_path: Path):
    sizes = ["", "12.5", "abc", "9" * 20, "-5"]
    with pytest.raises(RejectLimitExceeded):
        build(tmp_path, write_table(tmp_path / "a", columns={"size_bytes": sizes}), max_reject_fraction=0)
    manifest = build(tmp_path, SourceConfig(uri=str(tmp_path / "a" / "t.csv"), kind="table")).manifest
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
    build(tmp_path, several(parts, "abc"))
    with pytest.raises(UsageError, match="was built from a .*, b .*, c .*, not from a"):
        build(tmp_path, several(parts, "a"))
    build(tmp_path, several(parts, "ab"), "other")
    added = build(tmp_path, several(parts, "bc"), "other", write_mode="append").manifest
    assert added.counts.accepted == 15 and [each.uri for each in added.other_sources] == ["a, b"]
    with pytest.raises(UsageError, match="would only hold those of"):
        build(tmp_path, several(parts, "bc"), "other")


def test_an_append_has_labels_or_none_as_the_rows_that_are_there(tmp_path: Path, parts: dict[str, SourceConfig]):
    (tmp_path / "flat").mkdir()
    for number, file in enumerate(sorted((tmp_path / "a").rglob("*.png"))):
        shutil.copy(file, tmp_path / "flat" / f"{number}.png")
    names = ("class_0", "class_1")
    build(tmp_path, SourceConfig(uri=str(tmp_path / "flat")), label_map=names)
    with pytest.raises(UsageError, match="would have other labels"):
        build(tmp_path, parts["b"], label_map=names, write_mode="append")


def test_an_append_of_what_was_appended_before_makes_no_version(tmp_path: Path, parts: dict[str, SourceConfig]):
    copy = sorted((tmp_path / "a").rglob("*.png"))[0]
    shutil.copy(copy, copy.with_name("z.png"))
    for name in "ab":
        build(tmp_path, parts[name], write_mode="append", duplicates="drop")
    build(tmp_path, parts["a"], write_mode="append", duplicates="drop")
    assert open_dataset(str(tmp_path / "dataset")).pin.version == 2
    with pytest.raises(UsageError, match="would have other duplicates"):
        build(tmp_path, parts["c"], write_mode="append")


def test_a_repaired_archive_leaves_the_ledger(tmp_path: Path, parts: dict[str, SourceConfig]):
    shutil.make_archive(str(tmp_path / "zips" / "a_whole"), "zip", tmp_path / "a")
    shutil.make_archive(str(tmp_path / "zips" / "cut"), "zip", tmp_path / "b")
    cut = tmp_path / "zips" / "cut.zip"
    data = cut.read_bytes()
    cut.write_bytes(data[:-40])
    source = SourceConfig(uri=str(tmp_path / "zips"), kind="zip")
    build(tmp_path, source, write_mode="append")
    dataset = open_dataset(str(tmp_path / "dataset"))
    assert [each.key for each in read_rejections(dataset.store, dataset.manifest)] == ["cut.zip"]
    cut.write_bytes(data)
    manifest = build(tmp_path, source, write_mode="append").manifest
    assert (manifest.counts.listed, manifest.counts.accepted, manifest.counts.rejected) == (10, 10, 0)


def test_a_lost_shard_moves_no_image_between_stratified_splits(tmp_path: Path, parts: dict[str, SourceConfig]):
    write_images(tmp_path / "many", num_images=40, num_classes=2)
    source = SourceConfig(uri=str(tmp_path / "many"))
    before = build(tmp_path, source).manifest
    for file in (tmp_path / "dataset" / "shards" / "test").glob("*.parquet"):
        file.unlink()
    after = build(tmp_path, source, stratified_splits=True).manifest
    assert after.counts.by_split == before.counts.by_split
    with pytest.raises(ValueError, match="not both"):
        tree_of(tmp_path, source, stratified_splits=True, write_mode="append")


def test_a_source_that_was_appended_to_is_not_overwritten_unasked(tmp_path: Path, parts: dict[str, SourceConfig]):
    build(tmp_path, parts["a"])
    build(tmp_path, parts["b"], write_mode="append")
    for name, other in (("a", "b"), ("b", "a")):
        with pytest.raises(UsageError, match=f"also holds images of .*/{other}; .*append.*those of .*/{name}"):
            build(tmp_path, parts[name])
