"""Work units and splits: arithmetic over the listing, each source once, nothing that depends on a cluster."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.config import EtlConfig, SplitFractions
from etl.sources import Listing
from etl.units import fingerprint_config, plan_units
from etl.write_unit import split_of
from shardmill.ids import sample_id_of
from shardmill.values import SourceImage


def listing_of(num_images: int) -> Listing:
    keys = sorted(f"c{n % 3}/{n}.jpg" for n in range(num_images))
    return Listing(tuple(SourceImage(key, 10, label=key[:2], sample_id=sample_id_of(key)) for key in keys), ())


@given(st.integers(1, 700), st.integers(1, 90), st.integers(1, 200_000), st.integers(0, 5))
def test_each_source_is_in_one_unit_and_units_are_even(num_images: int, minimum: int, shard_bytes: int, seed: int):
    config = EtlConfig(image_size=32, unit_min_images=minimum, shard_max_bytes=shard_bytes, seed=seed)
    units = plan_units(listing_of(num_images), config, "config")
    keys = Counter(source.key for unit in units for source in unit.sources)
    assert keys == Counter(image.key for image in listing_of(num_images).images)
    sizes = [len(unit.sources) for unit in units]
    assert max(sizes) - min(sizes) <= 1 and [unit.index for unit in units] == list(range(len(units)))


def test_units_mix_the_classes():
    units = plan_units(listing_of(600), EtlConfig(image_size=32, unit_min_images=100), "config")
    assert all(len({source.label for source in unit.sources[:20]}) == 3 for unit in units)


def test_a_fingerprint_names_sources_and_config():
    config = EtlConfig(image_size=32)
    [unit] = plan_units(listing_of(10), config, "config")
    assert plan_units(listing_of(10), config, "config")[0].fingerprint == unit.fingerprint
    assert plan_units(listing_of(10), config, "other")[0].fingerprint != unit.fingerprint
    assert plan_units(listing_of(11), config, "config")[0].fingerprint != unit.fingerprint


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
    before, after = (fingerprint_config(config, ("a",), "n") for config in (EtlConfig(), EtlConfig(**change)))
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
