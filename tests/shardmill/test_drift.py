"""How far two versions are apart: against the definition, computed in other ways; and what it is called."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shardmill.data_faults.drift import Aspect, AspectDrift, amount_words, measure_drift, previous_content
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.open import open_dataset
from shardmill.dataset.statistics import NUM_SIDE_BUCKETS, ChannelSums, ImageSizes, SizeCounts
from tests.lab.datasets import make_dataset

_SEED = random.SystemRandom().randrange(2**32)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("drift"), num_images=90)


@pytest.fixture(scope="module")
def manifest(uri: str) -> Manifest:
    return open_dataset(f"{uri}@1").manifest


def with_counts(manifest: Manifest, by_class: dict[str, int]) -> Manifest:
    """All images in train."""
    train = manifest.splits["train"].model_copy(update={"class_counts": tuple(by_class.values())})
    return manifest.model_copy(update={"class_names": tuple(by_class), "splits": {"train": train}})


def with_pixels(manifest: Manifest, pixels_NC: np.ndarray) -> Manifest:
    sums, squares = pixels_NC.sum(0), (pixels_NC.astype(np.int64) ** 2).sum(0)
    of_all = ChannelSums(num_pixels=len(pixels_NC), sums=tuple(sums.tolist()), square_sums=tuple(squares.tolist()))
    return manifest.model_copy(update={"channel_sums": of_all})


def drift_in(aspect: Aspect, older: Manifest, newer: Manifest) -> AspectDrift:
    [found] = [each for each in measure_drift(older, newer).aspects if each.aspect == aspect]
    return found


def test_equal_rows_have_not_drifted_however_they_are_stored(uri: str, manifest: Manifest):
    compact_dataset(open_dataset(uri), "r")
    newer = open_dataset(uri)
    drift = measure_drift(manifest, newer.manifest)
    assert (drift.amount, [each.amount for each in drift.aspects]) == (0.0, [0.0] * len(Aspect))
    assert not any(each.figures for each in drift.aspects)
    # It holds the rows of the first version, before which there was none.
    assert previous_content(newer.store, newer.manifest) is None


def test_class_shares_are_one_minus_what_both_have_in_common(manifest: Manifest):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    for _ in range(100):
        names = [f"class_{number}" for number in range(rng.randint(1, 8))]
        before, after = ({name: rng.choice([0, 1, rng.randint(1, 9_999)]) for name in names} for _ in range(2))
        after = {name: count for name, count in after.items() if rng.random() < 0.8}
        before[names[0]], after["new"] = 7, 5
        shares = [{name: count / sum(each.values()) for name, count in each.items()} for each in (before, after)]
        expected = 1 - sum(min(share, shares[1].get(name, 0)) for name, share in shares[0].items())
        found = drift_in(Aspect.CLASS_SHARES, with_counts(manifest, before), with_counts(manifest, after))
        back = drift_in(Aspect.CLASS_SHARES, with_counts(manifest, after), with_counts(manifest, before))
        assert found.amount == pytest.approx(expected, abs=1e-12) and back.amount == found.amount
        if len(shares[0] | shares[1]) <= 5:
            turned = {each.name: (each.after, each.before) for each in back.figures}
            assert turned == {each.name: (each.before, each.after) for each in found.figures}
        # As many images again of every class are no drift.
        assert not drift_in(Aspect.CLASS_SHARES, *(with_counts(manifest, c) for c in (before, doubled(before)))).amount


def test_what_hardly_moved_is_not_listed_beside_what_did(manifest: Manifest):
    before, after = {"a": 468, "b": 322, "c": 210}, {"a": 467, "b": 433, "c": 100}
    found = drift_in(Aspect.CLASS_SHARES, with_counts(manifest, before), with_counts(manifest, after))
    assert found.moves == "b 32.2% -> 43.3%, c 21.0% -> 10.0%" and found.amount == pytest.approx(0.111)


def doubled(counts: dict[str, int]) -> dict[str, int]:
    return {name: 2 * count for name, count in counts.items()}


def test_pixels_are_as_far_apart_as_normal_distributions_of_their_moments(manifest: Manifest):
    print(f"seed {_SEED}")
    rng = np.random.default_rng(_SEED)
    values = np.linspace(-2_000, 2_000, 400_001)
    for darker, flatter in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.3), (0.1, 0.2)):
        before_NC = rng.integers(0, 256, (5_000, 3))
        after_NC = before_NC.copy()
        after_NC[:, 1] = np.clip(darker * (128 + flatter * (after_NC[:, 1] - 128.0)), 0, 255)
        found = drift_in(Aspect.PIXELS, with_pixels(manifest, before_NC), with_pixels(manifest, after_NC))
        densities = [
            np.exp(-(((values - channel.mean()) / channel.std()) ** 2) / 2) / (channel.std() * np.sqrt(2 * np.pi))
            for channel in (before_NC[:, 1], after_NC[:, 1])
        ]
        expected = 1 - np.minimum(*densities).sum() * (values[1] - values[0])
        assert found.amount == pytest.approx(expected, abs=1e-4)
        if found.amount:
            moved = {each.name: (round(each.before, 6), round(each.after, 6)) for each in found.figures}
            assert moved["green mean"] == (round(before_NC[:, 1].mean(), 6), round(after_NC[:, 1].mean(), 6))


def test_sizes_are_compared_as_the_sources_had_them(manifest: Manifest):
    sides = [0] * NUM_SIDE_BUCKETS
    sides[8], sides[9] = 45, 45
    assert manifest.sizes is not None
    larger = manifest.sizes.source.model_copy(update={"by_longer_side": tuple(sides)})
    newer = manifest.model_copy(update={"sizes": manifest.sizes.model_copy(update={"source": larger})})
    found = drift_in(Aspect.SOURCE_SIZES, manifest, newer)
    assert found.amount == 1.0 and "16-31 100.0% -> 0.0%" in found.moves and "512-1023 0.0% -> 50.0%" in found.moves
    assert drift_in(Aspect.ASPECT_RATIOS, manifest, newer).amount == 0.0


def test_what_cannot_be_compared_says_why_and_counts_for_nothing(manifest: Manifest):
    grey = with_pixels(manifest, np.full((9, 1), 200)).model_copy(update={"class_names": (), "splits": {}})
    unknown = grey.model_copy(update={"sizes": ImageSizes(source=SizeCounts())})
    drift = measure_drift(manifest, unknown)
    assert drift.amount == 0.0 and all(each.amount is None for each in drift.aspects)
    assert [each.why_not for each in drift.aspects] == [
        "labels are no classes",
        "a version has no recorded sizes",
        "a version has no recorded sizes",
        "one version is in colour, the other is grey",
    ]
    assert drift_in(Aspect.PIXELS, with_pixels(manifest, np.zeros((0, 3), int)), manifest).amount is None


def test_a_small_drift_is_not_shown_as_none():
    assert [amount_words(each) for each in (0.0, 0.00042, 0.104, 1.0)] == ["0.000", "0.0004", "0.104", "1.000"]
