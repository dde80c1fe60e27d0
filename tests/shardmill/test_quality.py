"""Quality of data: outliers, near duplicates, drift."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.checks.version import fault_warnings
from etl.config import EtlConfig
from shardmill.data_quality.drift import Aspect, AspectDrift, amount_words, measure_drift, previous_content
from shardmill.data_quality.findings import _copy_rows
from shardmill.data_quality.near_duplicates import SimilarImage, SimilarImages, connect, find_near_duplicates
from shardmill.data_quality.quality import Fault, find_faults
from shardmill.data_quality.row_looks import read_looks
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import RowReader
from shardmill.dataset.statistics import NUM_SIDE_BUCKETS, ChannelSums, ImageSizes, SizeCounts
from shardmill.errors import UsageError
from shardmill.images.look import difference_hash, luma
from shardmill.loader.samples import Samples
from tests.etl.incremental import build as build_version
from tests.etl.incremental import opened
from tests.lab.commands import in_process
from tests.lab.datasets import build_here, make_dataset

PLANTED = {
    "cat/uniform.png": {Fault.UNIFORM}, "dog/dark.png": {Fault.DARK}, "cat/blurred.png": {Fault.BLURRED},
    "dog/small.png": {Fault.ODD_SIZE}, "cat/wide.png": {Fault.ODD_ASPECT},
}  # fmt: skip


def photo(seed: int, height: int = 120, width: int = 160) -> np.ndarray:
    """Blobs with a fine texture on them."""
    rng = np.random.default_rng(seed)
    blobs = cv2.resize(rng.integers(20, 236, (6, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(blobs + rng.normal(0, 12, blobs.shape), 0, 255).astype(np.uint8)


def write(folder: Path, name: str, image_HWC: np.ndarray) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(folder / name), image_HWC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "images"
    for seed in range(60):
        write(folder, f"{('cat', 'dog')[seed % 2]}/{seed}.png", photo(seed))
    write(folder, "cat/uniform.png", np.full((120, 160, 3), 90, np.uint8))
    write(folder, "dog/dark.png", photo(100) // 12)
    write(folder, "cat/blurred.png", cv2.GaussianBlur(photo(101), (0, 0), 6))
    write(folder, "dog/small.png", photo(102, 24, 32))
    write(folder, "cat/wide.png", photo(103, 60, 240))
    return folder


def build(images: Path, into: Path, **options: object):
    build_here(str(images), str(into), EtlConfig(image_size=64, **options))
    return open_dataset(str(into))


def found(dataset) -> dict[str, set[Fault]]:
    by_source: dict[str, set[Fault]] = {}
    for each in find_faults(read_looks(dataset)).suspects:
        by_source.setdefault(each.source, set()).add(each.fault)
        sample = Samples(dataset, each.split)[each.row_in_split]
        assert sample.source == each.source, "the row in its split is that image"
    return by_source


@pytest.mark.parametrize("encoding", ["png", "jpeg"])
@pytest.mark.parametrize("mode", ["crop", "longer"])
def test_planted_faults_are_found_and_no_others(photos: Path, tmp_path: Path, encoding: str, mode: str):
    assert found(build(photos, tmp_path / "dataset", encoding=encoding, resize_mode=mode)) == PLANTED


def test_a_copied_row_keeps_its_look(tmp_path: Path):
    images = tmp_path / "images"
    for seed in range(12):
        write(images, f"cat/{seed}.png", photo(seed))
    build_version(tmp_path)
    before = _sharpness(tmp_path)
    (images / "cat/3.png").unlink()
    write(images, "cat/12.png", photo(12))
    assert build_version(tmp_path).manifest.operation == "incremental"
    after = _sharpness(tmp_path)
    assert after.keys() - before.keys() == {"cat/12.png"} and before.keys() - after.keys() == {"cat/3.png"}
    assert all(before[name] == after[name] for name in before.keys() & after.keys())


def _sharpness(folder: Path) -> dict[str, float]:
    looks = read_looks(opened(folder))
    return dict(zip(looks.sources, looks.sharpness_N.tolist(), strict=True))


@pytest.mark.parametrize(
    ("feature", "image_of_class"),
    [
        ("brightness", lambda label, seed: photo(seed) // (1 + 2 * label)),
        ("source size", lambda label, seed: photo(seed, 96 + 24 * label, 128 + 32 * label)),
        ("aspect ratio", lambda label, seed: photo(seed, 120, 120 + 60 * label)),
    ],
)
def test_a_telltale_is_named(feature: str, image_of_class: Callable[[int, int], np.ndarray], tmp_path: Path):
    for seed in range(60):
        write(tmp_path / "images", f"{('cat', 'dog')[seed % 2]}/{seed}.png", image_of_class(seed % 2, seed))
    dataset = build(tmp_path / "images", tmp_path / "dataset")
    telltales = find_faults(read_looks(dataset)).telltales
    assert feature in {each.feature for each in telltales}
    [named] = [each for each in telltales if each.feature == feature]
    assert named.accuracy > 0.9 and named.majority == 0.5
    # The build says so at its end.
    [warning] = _warned(dataset)
    assert f"{feature} alone tells the class of" in warning
    assert warning.endswith(f"`shardmill inspect {dataset.pin.uri}@1 --quality` shows them")


def _warned(dataset: Dataset) -> list[str]:
    return [*fault_warnings(RowReader(dataset.store, dataset.manifest.row_schema), dataset.manifest)]


def test_classes_of_like_images_have_no_telltale(photos: Path, tmp_path: Path):
    dataset = build(photos, tmp_path / "dataset")
    assert find_faults(read_looks(dataset)).telltales == ()
    [warning] = _warned(dataset)
    sizes = "1 much larger or smaller than the others, 1 much wider or narrower than the others"
    looks = f"1 nearly of one colour, 1 very dark, 1 blurred, {sizes}"
    assert warning.startswith(f"5 accepted images may be faulty: {looks}; `shardmill inspect ")


@pytest.mark.parametrize(("num_groups", "last"), [(4, "3 (train, cat)"), (6, "and 2 more: --json lists all")])
def test_groups_that_are_not_shown_are_counted(num_groups: int, last: str):
    groups = [SimilarImages((SimilarImage(str(each), "train", "cat"),)) for each in range(num_groups)]
    assert _copy_rows("equal bytes", groups)[-1] == ("", last)


def test_copies_are_named_with_units_and_values_with_names(photos: Path, tmp_path: Path):
    images = tmp_path / "images"
    for name, copies in (
        ("3.png", ("cat/a.png", "dog/b.png")),
        ("uniform.png", ("cat/c.png", "cat/d.png", "cat/e.png")),
    ):
        source = next(photos.glob(f"*/{name}"))
        for each in copies:
            (images / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, images / each)
    for seed in range(10, 30):
        shutil.copy(next(photos.glob(f"*/{seed}.png")), images / "dog")
    build(images, tmp_path / "dataset")
    asked = ("inspect", tmp_path / "dataset", "--quality")
    lines = in_process(*asked, cwd=tmp_path).stdout.splitlines()
    place = lines.index("equal bytes\t2 groups with 5 images; 0 groups in several splits, 1 of several classes")
    of_several, alike = (line.split("; ") for line in lines[place + 1 : place + 3])
    assert [re.sub(r"\(.*, (\w+)\)", r"\1", each) for each in of_several] == ["\tcat/a.png cat", "dog/b.png dog"]
    assert len(alike) == 3
    assert re.search(r"^\tcat/c.png \(\w+, cat\): contrast 0 of 255, usually [\d.]+ of 255$", "\n".join(lines), re.M)
    found = json.loads(in_process(*asked, "--json", cwd=tmp_path).stdout)
    equal = found["equal_bytes"]
    assert (equal["num_groups"], equal["num_images"], equal["conflicting_label"]) == (2, 5, 2)
    assert [len(group["images"]) for group in equal["groups"]] == [2, 3] and equal["groups"][0]["conflicting_label"]
    assert found["measures"]["odd_size"] == "root of the source's area"
    # Those that have something to compare are near duplicates as well.
    assert found["near_duplicates"] == equal["groups"][:1]


def picture(seed: int, side: int = 96) -> np.ndarray:
    """Large blobs, as photos have and noise has not."""
    blobs = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return cv2.resize(blobs, (side, side), interpolation=cv2.INTER_CUBIC)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("near")
    for name in ("train/cat", "train/dog", "test/cat"):
        (folder / "images" / name).mkdir(parents=True)
    for seed in range(12):
        cv2.imwrite(str(folder / "images" / "train" / ("cat", "dog")[seed % 2] / f"{seed}.png"), picture(seed))
    cv2.imwrite(str(folder / "images/test/cat/resized.jpg"), picture(0, 61), [cv2.IMWRITE_JPEG_QUALITY, 60])
    cv2.imwrite(str(folder / "images/train/cat/brighter.png"), cv2.convertScaleAbs(picture(1), alpha=0.9, beta=20))
    for shade in (10, 200):
        cv2.imwrite(str(folder / f"images/train/dog/plain{shade}.png"), np.full((40, 40, 3), shade, np.uint8))
    build_here(str(folder / "images"), str(folder / "dataset"), EtlConfig(image_size=48, encoding="jpeg"))
    return open_dataset(str(folder / "dataset"))


def test_copies_are_found_and_leaks_lead(dataset):
    leak, conflict = find_near_duplicates(read_looks(dataset), 3).groups
    assert [image.source for image in leak.images] == ["test/cat/resized.jpg", "train/cat/0.png"]
    assert leak.crosses_splits and not leak.has_conflict
    assert [image.source for image in conflict.images] == ["train/cat/brighter.png", "train/dog/1.png"]
    assert conflict.has_conflict and not conflict.crosses_splits


def test_the_number_of_bits_is_checked(dataset):
    with pytest.raises(UsageError, match="expected 0 to 7"):
        find_near_duplicates(read_looks(dataset), 8)


def hashes_with_neighbours(common_bits: int, count: int = 1500) -> np.ndarray:
    """Random but for the lowest bits; of a fifth there are neighbours, at every distance up to 9."""
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = np.random.default_rng(seed)
    hashes = generator.integers(0, 2**64, count, np.uint64) >> np.uint64(common_bits) << np.uint64(common_bits)
    flips = [
        sum(1 << int(bit) for bit in generator.choice(64, place % 9 + 1, replace=False)) for place in range(count // 5)
    ]
    return np.unique(np.concatenate([hashes, hashes[: len(flips)] ^ np.array(flips, np.uint64)]))


def distances(hashes: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(hashes.view(np.uint8).reshape(-1, 8), axis=1).astype(np.float32)
    ones = bits.sum(axis=1)
    return ones[:, None] + ones[None] - 2 * bits @ bits.T


def connected_one_by_one(is_near: np.ndarray) -> np.ndarray:
    """Of each row the first row of its component, by a walk."""
    first = np.full(len(is_near), -1)
    for start in range(len(is_near)):
        reached = [start] if first[start] < 0 else []
        while reached:
            new = np.flatnonzero(is_near[reached.pop()] & (first < 0))
            first[new] = start
            reached += new.tolist()
    return first


# A white margin is one band of a thumbnail that all images have in common, or two.
@pytest.mark.parametrize("common_bits", [0, 16, 32, 46])
def test_no_near_hash_is_missed(common_bits: int):
    hashes = hashes_with_neighbours(common_bits)
    apart = distances(hashes)
    for max_bits in range(8):
        found = connect(hashes, max_bits)
        assert found.representative_U.tolist() == connected_one_by_one(apart <= max_bits).tolist(), max_bits
        assert not found.is_left_out_U.any()


@pytest.mark.parametrize("common_bits", [16, 32])
def test_a_common_band_does_not_lead_to_a_comparison_of_each_with_each(common_bits: int):
    hashes = hashes_with_neighbours(common_bits, 20_000)
    num_pairs = len(hashes) ** 2 // 2
    assert not connect(hashes, 3, max_comparisons=num_pairs // 8).is_left_out_U.any()


def test_hashes_beyond_the_limit_are_named_and_those_of_others_are_exact():
    crowd = np.arange(2**11, dtype=np.uint64)
    others = hashes_with_neighbours(0)
    hashes = np.unique(np.concatenate([crowd, others]))
    found = connect(hashes, 3, max_comparisons=500_000)
    assert found.is_left_out_U.any()
    expected = connected_one_by_one(distances(hashes) <= 3)
    # A left-out hash may have connected others.
    is_exact = ~np.isin(expected, expected[found.is_left_out_U])
    assert is_exact.sum() > 1000
    assert found.representative_U[is_exact].tolist() == expected[is_exact].tolist()


def test_a_plain_image_has_no_hash():
    assert difference_hash(luma(np.full((32, 32, 1), 7, np.uint8))) is None
    assert difference_hash(luma(picture(3))) == difference_hash(luma(picture(3)))


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
        twice = {name: 2 * count for name, count in before.items()}
        assert not drift_in(Aspect.CLASS_SHARES, *(with_counts(manifest, c) for c in (before, twice))).amount


def test_what_hardly_moved_is_not_listed_beside_what_did(manifest: Manifest):
    before, after = {"a": 468, "b": 322, "c": 210}, {"a": 467, "b": 433, "c": 100}
    found = drift_in(Aspect.CLASS_SHARES, with_counts(manifest, before), with_counts(manifest, after))
    assert found.moves == "b 32.2% -> 43.3%, c 21.0% -> 10.0%" and found.amount == pytest.approx(0.111)


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
