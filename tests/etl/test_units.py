"""Work units and splits: arithmetic over the listing, each source once, nothing that depends on a cluster."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.config import EtlConfig, EtlTree, SourceConfig, SplitFractions, etl_settings_of
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.listing.splits import split_of
from etl.plan import plan_build
from etl.setting_kinds import EQUAL_IN_APPENDS
from etl.sources.listed import ListingBatch, batches_of
from etl.units.units import ListingPlace, WorkUnit, fingerprint_config, plan_units, read_unit
from shardmill.formats.rows import RowSchema
from shardmill.ids import sample_id_of
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.values import SourceImage
from tests.etl.building import ETL, build_source
from tests.lab.datasets import write_images


class ListedKeys:
    """A source of names without files."""

    uri = "nowhere"

    def __init__(self, num_images: int) -> None:
        self._images = [SourceImage(f"c{n % 3}/{n}.jpg", 10, label=f"c{n % 3}") for n in range(num_images)]

    def list(self) -> Iterator[ListingBatch]:
        return batches_of(self._images)


def listing_of(num_images: int, seed: int = 0) -> Listing:
    return list_source(ListedKeys(num_images), seed=seed, max_source_bytes=100, observer=SilentObserver())


def sources_of(listing: Listing, unit: WorkUnit, seed: int = 0) -> tuple[SourceImage, ...]:
    return read_unit(ListingPlace(str(listing.folder), listing.segments), unit, seed)


@given(st.integers(1, 120), st.integers(1, 40), st.integers(1, 200_000), st.integers(0, 5))
def test_each_source_is_in_one_unit_and_its_unit_knows_its_number(
    num_images: int, minimum: int, shard_bytes: int, seed: int
):
    config = EtlConfig(image_size=32, unit_min_images=minimum, shard_max_bytes=shard_bytes, seed=seed)
    listing = listing_of(num_images, seed)
    units = plan_units(listing, config, "config")
    sources = [sources_of(listing, unit, seed) for unit in units]
    assert Counter(image.key for each in sources for image in each) == Counter(
        f"c{n % 3}/{n}.jpg" for n in range(num_images)
    )
    assert [len(each) for each in sources] == [unit.num_images for unit in units]
    assert all(image.sample_id == sample_id_of(image.key) for each in sources for image in each)
    # A power of two of equal ranges, so that none is empty or twice as large by plan.
    assert len({unit.last_cell - unit.first_cell for unit in units}) == 1
    assert [unit.index for unit in units] == sorted(unit.index for unit in units)


def test_large_files_make_units_of_fewer_images():
    config = EtlConfig(image_size=256)
    files = [SourceImage(f"c0/{number}.jpg", 5_000_000, label="c0") for number in range(200)]

    class Photos(ListedKeys):
        def list(self) -> Iterator[ListingBatch]:
            return batches_of(files)

    listing = list_source(Photos(0), seed=0, max_source_bytes=10_000_000, observer=SilentObserver())
    assert len(plan_units(listing, config, "config")) == 32
    assert len(plan_units(listing_of(200), config, "config")) == 1


def test_rows_with_keys_that_name_one_file_are_split_over_units(tmp_path: Path):
    write_images(tmp_path / "images", num_images=3, num_classes=1)
    rows = [f"images/class_0/0000{max(0, number - 597)}.png,a,row {number}" for number in range(600)]

    def table(lines: list[str]) -> SourceConfig:
        (tmp_path / "t.csv").write_text("\n".join(["uri,label,key", *lines]))
        return SourceConfig(uri=str(tmp_path / "t.csv"), kind="table")

    tree = EtlTree(source=table(rows), dataset=DatasetConfig(uri=str(tmp_path / "dataset")), etl=ETL)
    units = plan_build(tree, run_id="r").units
    assert len(units) == 32 and max(unit.num_images for unit in units) < 50
    # In whatever order the table lists them.
    found = [build_source(table(lines), tmp_path / str(place)) for place, lines in enumerate((rows, rows[::-1]))]
    assert [each.counts.accepted for each in found] == [600, 600]
    assert len({(each.content_digest, each.layout_digest) for each in found}) == 1


def test_units_mix_the_classes():
    listing = listing_of(600)
    units = plan_units(listing, EtlConfig(image_size=32, unit_min_images=100), "config")
    assert len(units) == 8
    assert all(len({source.label for source in sources_of(listing, unit)[:30]}) == 3 for unit in units)


def test_a_fingerprint_names_sources_and_config():
    config = EtlConfig(image_size=32)
    [unit] = plan_units(listing_of(10), config, "config")
    assert plan_units(listing_of(10), config, "config")[0].fingerprint == unit.fingerprint
    assert plan_units(listing_of(10), config, "other")[0].fingerprint != unit.fingerprint
    assert plan_units(listing_of(11), config, "config")[0].fingerprint != unit.fingerprint


def test_a_listing_that_grows_changes_only_the_units_that_get_new_images():
    config = EtlConfig(image_size=32, unit_min_images=20)
    before, after = (plan_units(listing_of(num), config, "config") for num in (400, 404))
    assert len({unit.fingerprint for unit in before} & {unit.fingerprint for unit in after}) >= len(before) - 4


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"max_reject_fraction": 0.5}, True),
        ({"max_unreadable_fraction": 0.5}, True),
        ({"max_changed_fraction": 0.5}, True),
        ({"scratch_dir": "/somewhere"}, True),
        ({"formats": ("tfrecord",)}, False),
        ({"chunk_bytes": 5}, False),
        ({"decode_timeout_seconds": 20}, False),
        ({"seed": 5}, False),
        ({"split_fractions": SplitFractions(train=1, validation=0, test=0)}, False),
    ],
)
def test_the_config_fingerprint_covers_what_decides_a_units_output(change: dict, same: bool):
    before, after = (
        fingerprint_config(config, RowSchema("jpeg", None, ("a",)), "n")
        for config in (EtlConfig(), EtlConfig(**change))
    )
    assert (before == after) is same


def test_splits_follow_the_content_and_come_out_in_their_shares():
    fractions = SplitFractions(train=0.7, validation=0.2, test=0.1)
    hashes = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(5000)]
    found = Counter(split_of(SourceImage(f"{n}", 1), digest, fractions) for n, digest in enumerate(hashes))
    assert abs(found["train"] / 5000 - 0.7) < 0.03 and abs(found["test"] / 5000 - 0.1) < 0.02
    for digest in hashes[:50]:
        assert split_of(SourceImage("a", 1), digest, fractions) == split_of(SourceImage("b", 2), digest, fractions)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_a_share_of_one_takes_everything(split: str):
    fractions = SplitFractions(**{"train": 0, "validation": 0, "test": 0, split: 1})
    for digest in ("0" * 64, "f" * 64, hashlib.sha256(b"x").hexdigest()):
        assert split_of(SourceImage("a", 1), digest, fractions) == split


def test_a_split_folder_wins_over_the_hash():
    assert split_of(SourceImage("a", 1, split="test"), "0" * 64, SplitFractions()) == "test"


def test_units_that_were_finished_before_today_are_recognised():
    """A new key must not change this: declare REBUILDS_NOTHING, or leave it out of the fingerprint at its default."""
    config = EtlConfig(
        engine="local", num_workers=3, scratch_dir="/s", write_mode="append", detect_changes="content",
        max_reject_fraction=1, max_unreadable_fraction=1, max_changed_fraction=1,
        max_vanished_fraction=1, label_map=("a",), unknown_class="error",
    )  # fmt: skip
    for each in (EtlConfig(), EtlConfig(stratified_splits=True), config):
        found = fingerprint_config(each, RowSchema("jpeg", None, ("a",)), "n")
        assert found == "49eb215163607088847d4da12c2dbf2f6c42c703f2d9558ef0ad7856f21bf323"


def test_appends_need_these_settings_alone():
    assert etl_settings_of(EQUAL_IN_APPENDS) == ("split_fractions", "duplicates")
