"""The same image, or the same id, more than once."""

from __future__ import annotations

import random
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset
from etl.listing import list_source as listing_module
from etl.listing import listing as segments
from etl.listing.grouping import group_here
from etl.listing.listing import Listing
from etl.units.units import ListingLocation, plan_units, read_unit
from shardmill import ids
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.row_segments import read_rows
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING, Observer
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.etl.building import COLLIDING, ETL, Recorder, images, images_of, listed
from tests.etl.incremental import build
from tests.lab.datasets import HERE, write_images

_COPIES = ("class_0/a_copy.png", "class_1/z_copy.png", "class_2/z_copy.png")


def build_with(
    folder: Path, dataset: str, duplicates: str, source: SourceConfig | None = None, observer: Observer | None = None
) -> BuildOutcome:
    etl = ETL.model_copy(update={"engine": HERE, "duplicates": duplicates})
    source = source or SourceConfig(uri=str(folder / "images"))
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / dataset)), etl=etl)
    return build_dataset(tree, run_id=uuid.uuid4().hex, observer=observer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", num_images=60)
    for name in _COPIES:
        shutil.copy(tmp_path / "images" / "class_0" / "00003.png", tmp_path / "images" / name)
    return tmp_path


def test_the_smallest_key_stays_and_the_rest_is_as_if_the_others_had_never_been(folder: Path):
    dropped = build_with(folder, "dropped", "drop").manifest
    assert dropped.counts.by_reason == {"duplicate_content": 3}
    assert (dropped.counts.listed, dropped.counts.accepted, dropped.counts.duplicate_content) == (63, 60, 0)
    verify_dataset(open_dataset(str(folder / "dropped")), deep=True).raise_if_failed()
    # "00003.png" sorts before the copies.
    for name in _COPIES:
        (folder / "images" / name).unlink()
    assert build_with(folder, "without", "report").manifest.content_digest == dropped.content_digest


def test_a_copy_comes_back_once_its_original_is_gone(folder: Path):
    build_with(folder, "dataset", "drop")
    assert build_with(folder, "dataset", "drop").skipped
    (folder / "images" / "class_0" / "00003.png").unlink()
    manifest = build_with(folder, "dataset", "drop").manifest
    assert (manifest.operation, manifest.counts.accepted) == ("incremental", 60)
    assert manifest.content_digest == build_with(folder, "whole", "drop").manifest.content_digest
    verify_dataset(open_dataset(str(folder / "dataset")), deep=True).raise_if_failed()


def test_an_error_publishes_nothing_and_names_them(folder: Path):
    with pytest.raises(RejectLimitExceeded, match=r"3 inputs .* same bytes .* class_0/a_copy.png = class_0/00003"):
        build_with(folder, "dataset", "error")
    assert latest_version(open_store(folder / "dataset")) == 0
    for name in _COPIES:
        (folder / "images" / name).unlink()
    assert build_with(folder, "dataset", "error").published


def write_table(folder: Path, column: str, value_of: Callable[[str], str]) -> SourceConfig:
    """A table of all images with one more column."""
    names = sorted(str(file.relative_to(folder / "images")) for file in (folder / "images").rglob("*.png"))
    lines = [f"uri,label,{column}", *(f"{name},{name.split('/')[0]},{value_of(name)}" for name in names)]
    (folder / "images" / "table.csv").write_text("\n".join(lines))
    return SourceConfig(uri=str(folder / "images" / "table.csv"), kind="table")


def by_folder(folder: Path) -> SourceConfig:
    for split in ("train", "test"):
        shutil.copytree(folder / "images", folder / "split" / split, ignore=shutil.ignore_patterns("*.csv"))
    for file in (folder / "split" / "test").rglob("*.png"):
        if str(file.relative_to(folder / "split" / "test")) not in _COPIES:
            file.unlink()
    for name in _COPIES:
        (folder / "split" / "train" / name).unlink()
    return SourceConfig(uri=str(folder / "split"))


_NAMED_SPLITS: dict[str, Callable[[Path], SourceConfig]] = {
    "split column": lambda folder: write_table(folder, "split", lambda name: "test" if name in _COPIES else "train"),
    "group column": lambda folder: write_table(folder, "group", lambda name: f"patient of {name}"),
    "split folders": by_folder,
}


@pytest.mark.parametrize("how", _NAMED_SPLITS)
def test_equal_bytes_in_two_splits_are_counted_and_warned_of(how: str, folder: Path):
    source, recorder = _NAMED_SPLITS[how](folder), Recorder()
    manifest = build_with(folder, "dataset", "report", source, recorder).manifest
    dataset = open_dataset(str(folder / "dataset"))
    # The original and its three copies, or none.
    splits = {
        sample.source: split
        for split, info in manifest.splits.items()
        for sample in read_samples(dataset, split, info.num_rows)
        if sample.source.endswith(("class_0/00003.png", *_COPIES))
    }
    assert len(splits) == 4 and len(set(splits.values())) > 1
    assert (manifest.counts.duplicate_content, manifest.counts.leaked_content) == (3, 4)
    warning = str(recorder.events["etl.warning"][WARNING])
    assert warning.startswith("4 accepted images have the same bytes as one in another split, such as ")
    firsts = [next(name for name in sorted(splits) if splits[name] == split) for split in set(splits.values())]
    assert f"such as {', '.join(f'{name} ({splits[name]})' for name in sorted(firsts))};" in warning
    verify_dataset(dataset, deep=True).raise_if_failed()
    # One of them stays, so nothing leaks; and contents alone never put them into two splits.
    assert build_with(folder, "dropped", "drop", source).manifest.counts.leaked_content == 0
    assert build_with(folder, "by_content", "report").manifest.counts.leaked_content == 0


_MASK = 31


@pytest.fixture
def short_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can make keys with more than two of one id, so the first bits are masked: of the next 8 bytes, too."""
    of_keys, of_key = segments.sample_ids, ids.sample_id_of

    def short(key: str, block: int = 0) -> int:
        return of_key(key, block) & (_MASK if block == 0 else 4 * _MASK + 3 if block == 1 else -1)

    monkeypatch.setattr(ids, "sample_id_of", short)
    for module in (segments, listing_module):
        monkeypatch.setattr(module, "sample_ids", lambda keys_N32: of_keys(keys_N32) & _MASK)


def ids_by_hand(keys: list[str]) -> dict[str, int]:
    """Every key takes the first of its ids that no smaller key has."""
    taken: dict[int, str] = {}
    for key in sorted(keys):
        block = 0
        while ids.sample_id_of(key, block) in taken:
            block += 1
        taken[ids.sample_id_of(key, block)] = key
    return {key: sample_id for sample_id, key in taken.items()}


def test_the_smallest_key_keeps_an_id_in_whatever_order_and_parts_they_come(short_ids: None, monkeypatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 20)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    some = [replace(image, key=f"{rng.random()}.jpg") for image in images(60)]
    expected = ids_by_hand([image.key for image in some])
    assert len({ids.sample_id_of(key) for key in expected}) < len(expected)
    twice = [replace(image, place=7) for image in rng.sample(some, 5)]
    found: set[tuple[object, ...]] = set()
    for group in (group_here, lambda asked: group_here(replace(asked, rows_per_part=9))):
        shuffled = [*some, *twice]
        rng.shuffle(shuffled)
        listing = listed(*np.array_split(np.array(shuffled, object), 4), group=group)
        assert {image.key: image.sample_id for image in images_of(listing)} == expected
        assert [each.key for each in listing.rejections] == sorted(f"{image.key}\0002" for image in twice)
        found.add((listing.fingerprint, listing.key_sum, listing.num_listed, *units_of(listing)))
    assert len(found) == 1
    # Without the keys that come before them, others have other ids, and their units other names; a unit may have none.
    rest = sorted(some, key=lambda image: image.key)[20:]
    alone, all_units = listed(rest), {unit for each in found for unit in each[3:]}
    assert {image.key: image.sample_id for image in images_of(alone)} == ids_by_hand([image.key for image in rest])
    assert len(all_units.intersection(units_of(alone))) <= 1


def test_a_few_images_that_are_listed_thousands_of_times_are_refused_each_time_but_the_first():
    """A table with a row for each box in a picture, say."""
    listing = listed([image for image in images(3) for _ in range(2000)])
    assert len(images_of(listing)) == 3 and listing.num_listed == 6000
    assert len(listing.rejections) == len({each.key for each in listing.rejections}) == 5997


def units_of(listing: Listing) -> list[object]:
    """Every unit's fingerprint; that its images can be read shows that their facts were counted as they are."""
    units = plan_units(listing, EtlConfig(unit_min_images=10), "config")
    read = [read_unit(ListingLocation(str(listing.folder), listing.segments), unit, 0) for unit in units]
    assert sum(map(len, read)) == listing.num_images
    return [unit.fingerprint for unit in units]


def paint(folder: Path, name: str) -> None:
    file = folder / "images" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(sum(name.encode())).integers(0, 255, (16, 16, 3), np.uint8)
    assert cv2.imwrite(str(file), pixels)


def rows_of(folder: Path, dataset: str = "dataset") -> dict[str, int]:
    """Key -> sample id of every row."""
    found = open_dataset(str(folder / dataset))
    verify_dataset(found).raise_if_failed()
    shards = [shard for shard in found.shards if shard.format == "parquet"]
    tables = [read_rows(found.store, shard, found.manifest.row_schema) for shard in shards]
    columns = [[table.column(name).to_pylist() for name in ("source", "sample_id")] for table in tables]
    return {key: sample_id for pairs in columns for key, sample_id in zip(*pairs, strict=True)}


@pytest.mark.parametrize(("first", "second", "detect_changes"), [(*COLLIDING, "stat"), (*COLLIDING[::-1], "content")])
def test_a_row_whose_id_a_new_or_removed_key_changes_is_made_again(
    first: str, second: str, detect_changes: str, tmp_path: Path
):
    """These two keys have one hash of 64 bits indeed."""
    smaller, larger = COLLIDING
    assert ids.sample_id_of(smaller) == ids.sample_id_of(larger)
    names = [*(f"a/{number}.png" for number in range(8)), *(f"b/{number}.png" for number in range(8)), first]
    for name in names:
        paint(tmp_path, name)

    def built(version: int) -> dict[str, int]:
        manifest = build(tmp_path, detect_changes=detect_changes).manifest
        whole = build(tmp_path, f"whole_{version}").manifest
        assert (manifest.version, whole.version) == (version, 1)
        assert manifest.content_digest == whole.content_digest
        rows = rows_of(tmp_path)
        assert rows == rows_of(tmp_path, f"whole_{version}")
        return rows

    assert built(1)[first] == ids.sample_id_of(first)
    paint(tmp_path, second)
    both = built(2)
    assert (both[smaller], both[larger]) == (ids.sample_id_of(smaller), ids.sample_id_of(larger, 1))
    (tmp_path / "images" / first).unlink()
    assert built(3)[second] == ids.sample_id_of(second)
