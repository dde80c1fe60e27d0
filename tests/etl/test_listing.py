"""A listing is the same in whatever order and batches it comes; what is listed twice is counted, and ids are unique."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from etl import list_source as listing_module
from etl.config import EtlConfig
from etl.grouping import Group, group_here
from etl.list_source import list_source
from etl.listed import ListingBatch, listed_table
from etl.listing import Listing
from etl.units import plan_units
from shardmill import ids
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.jobs.observer import SilentObserver
from shardmill.values import SourceImage
from tests.etl.building import images_of

_SEED = random.SystemRandom().randrange(2**32)


class Batches:
    """A source that lists what it is given."""

    uri = "nowhere"

    def __init__(self, batches: list[list[SourceImage]]) -> None:
        self._batches = batches

    def list(self) -> Iterator[ListingBatch]:
        return (ListingBatch(listed_table(batch)) for batch in self._batches)


def listed(*batches: list[SourceImage], group: Group = group_here) -> Listing:
    return list_source(Batches(list(batches)), seed=0, max_source_bytes=1_000, observer=SilentObserver(), group=group)


def images(num_images: int) -> list[SourceImage]:
    return [SourceImage(f"c{n % 7}/{n}.jpg", n % 900, mtime_ns=n, label=f"c{n % 7}") for n in range(num_images)]


def facts(listing: Listing) -> tuple[object, ...]:
    units = plan_units(listing, EtlConfig(unit_min_images=50), "config")
    return (listing.fingerprint, listing.key_sum, listing.probes, listing.class_names, listing.num_listed, units)


def test_order_batches_and_segments_change_nothing(monkeypatch: pytest.MonkeyPatch):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    expected = facts(listed(images(1_000)))
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 300)
    shuffled = images(1_000)
    rng.shuffle(shuffled)
    found = listed(shuffled[:1], shuffled[1:620], shuffled[620:])
    assert len(found.segments) > 1 and facts(found) == expected


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
