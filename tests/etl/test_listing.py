"""A listing is the same in whatever order and batches it comes; what is listed twice is counted, and ids are unique."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from etl.config import EtlConfig
from etl.listing import list_source as listing_module
from etl.listing.grouping import GroupBy, group_here
from etl.units.units import ListingPlace, plan_units, read_unit
from shardmill import ids
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.mix import mix64_array
from shardmill.stores import STORES
from shardmill.values import SourceImage
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.etl.building import images_of
from tests.etl.listings import facts, images, listed

_SEED = random.SystemRandom().randrange(2**32)


def test_order_batches_and_segments_change_nothing(monkeypatch: pytest.MonkeyPatch):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    expected = facts(listed(images(1_000)))
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 300)
    shuffled = images(1_000)
    rng.shuffle(shuffled)
    found = listed(shuffled[:1], shuffled[1:620], shuffled[620:])
    assert len(found.segments) > 1 and facts(found) == expected


def test_a_unit_reads_the_segments_of_its_own_range_of_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 100)
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    found = listed(*(images(2_000)[first : first + 250] for first in range(0, 2_000, 250)))
    ranges = [(segment.first_cell, segment.last_cell) for segment in found.segments]
    assert len(ranges) == 20 and all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert sum(segment.num_rows for segment in found.segments) == 2_000
    # What the listing was made of is gone.
    assert {file.name for file in found.folder.iterdir()} == {segment.path for segment in found.segments}

    units = plan_units(found, EtlConfig(unit_min_images=20), "config")
    assert len(units) == 64
    CALLS.clear()
    place = ListingPlace(f"{SCHEME}://{found.folder}", found.segments)
    read = [image.key for unit in units for image in read_unit(place, unit, 0)]
    assert sorted(read) == sorted(image.key for image in images(2_000))
    # Each opens one, and one more for each border between two segments inside its range.
    assert 64 <= CALLS["stat"] <= 64 + 19


def test_a_listing_in_the_order_of_its_cells_is_not_sorted_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 300)
    first = listed(*(images(1_000)[first : first + 200] for first in range(0, 1_000, 200)))
    some = images_of(first)
    in_order = sorted(some, key=lambda image: int(mix64_array(np.array([image.sample_id]), 0)[0]))

    def group(asked: GroupBy) -> Iterator[pa.Table]:
        assert asked.schema.names == ["sample_id"], "the images were sorted again"
        return group_here(asked)

    again = listed(*(in_order[first : first + 200] for first in range(0, 1_000, 200)), group=group)
    assert facts(again) == facts(first) and len(again.segments) == 3


def test_a_segment_of_which_all_rows_are_listed_elsewhere_is_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 10)
    found = listed(images(10), images(10)[3:5], images(30)[10:])
    assert len(images_of(found)) == 30 and len(found.rejections) == 2
    units = plan_units(found, EtlConfig(unit_min_images=5), "config")
    place = ListingPlace(str(found.folder), found.segments)
    assert sum(len(read_unit(place, unit, 0)) for unit in units) == 30


def test_what_is_listed_twice_is_accepted_once_and_refused_under_a_key_of_its_own():
    twice = [SourceImage("a.jpg", 1, place=place, label="x") for place in (2, 0, 1)]
    found = listed([*images(50), twice[0]], [*twice[1:], SourceImage("b.jpg", 1, label="x")])
    assert [(each.key, str(each.reason)) for each in found.rejections] == [
        ("a.jpg\0" + number, "duplicate_key") for number in "23"
    ]
    assert (found.num_listed, found.num_images, sum(found.images_by_bucket)) == (54, 52, 52)
    kept = images_of(found)
    assert [(image.place, image.sample_id) for image in kept if image.key == "a.jpg"] == [
        (0, ids.sample_id_of("a.jpg"))
    ]
    # The sums are those of a listing that never had them, but for the refused keys.
    once = listed([*images(50), twice[1]], [SourceImage("b.jpg", 1, label="x")])
    assert (found.facts_by_bucket.sum(axis=0) == once.facts_by_bucket.sum(axis=0)).all()
    refused = (key_hash(each.key) for each in found.rejections)
    assert found.key_sum == format_digest(add_digests(int(once.key_sum, 16), *refused))


def test_the_segments_go_with_the_listing():
    found = listed(images(10))
    folder = found.folder
    assert folder.is_dir()
    del found
    assert not folder.exists()
