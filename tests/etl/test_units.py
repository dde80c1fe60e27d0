"""How images become units and units shards: sizes, order, splits, what decides them."""

from __future__ import annotations

import hashlib
import random
import shutil
import tracemalloc
import uuid
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.config import EQUAL_IN_APPENDS, EtlConfig, EtlTree, SourceConfig, SplitFractions, etl_settings_of
from etl.job import build_dataset
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.listing.splits import share_out, split_of, whole_quotas
from etl.plan import BuildPlan, plan_build
from etl.sources.listed import ListingBatch, batches_of, listed_table
from etl.units.units import ListingLocation, WorkUnit, fingerprint_config, plan_units, read_unit
from etl.units.write_unit import write_unit
from shardmill.dataset.build import UnitResult
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.encodings import decode_row
from shardmill.formats.rows import RowSchema
from shardmill.ids import sample_id_of
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.loader.reader import read_batches
from shardmill.loader.samples import read_samples
from shardmill.values import SourceImage
from tests.etl.building import ETL, build_source
from tests.lab.datasets import HERE, write_images
from tests.shardmill.images.make import photo, png


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
    return read_unit(ListingLocation(str(listing.folder), listing.segments), unit, seed)


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


_NUM_IMAGES, _SIDE = 60, 200
_SHARD_BYTES = 1_000_000


def one_unit(folder: Path, kind: str, **etl: object) -> BuildPlan:
    """A plan of one unit whose images take 7 MB, in folders or in ZIP files."""
    rng = np.random.default_rng(0)
    files = {}
    for number in range(_NUM_IMAGES):
        noise_HWC = rng.integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
        files[f"class_{number % 3}/{number}.png"] = cv2.imencode(".png", noise_HWC)[1].tobytes()
    for number, (name, data) in enumerate(files.items()):
        if kind == "zip":
            folder.mkdir(exist_ok=True)
            with zipfile.ZipFile(folder / f"{number % 2}.zip", "a") as archive:
                archive.writestr(name, data)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    config = EtlConfig(encoding="png", resize_mode="none", chunk_bytes=300_000, unit_min_images=1000, **etl)  # pyright: ignore[reportArgumentType]
    tree = EtlTree(
        source=SourceConfig(uri=str(folder), kind="zip" if kind == "zip" else "folders"),
        dataset=DatasetConfig(uri=f"{folder}-dataset"), etl=config,
    )  # fmt: skip
    plan = plan_build(tree, run_id="r")
    assert len(plan.units) == 1
    return plan


def written(plan: BuildPlan, shard_max_bytes: int) -> UnitResult:
    """The unit as if its stored size had been guessed too small by far."""
    config = plan.task.config.model_copy(update={"shard_max_bytes": shard_max_bytes})
    return write_unit(plan.units[0], replace(plan.task, config=config))


def chunks_of(result: UnitResult) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for shard in result.shards:
        if shard.format == "parquet":
            found.setdefault(shard.split, []).extend(chunk.content_sha256 for chunk in shard.chunks)
    return found


@pytest.mark.parametrize("kind", ["folders", "zip"])
def test_a_large_unit_takes_the_memory_of_its_largest_shards(kind: str, tmp_path: Path):
    plan = one_unit(tmp_path / "images", kind)
    written(plan, _SHARD_BYTES)  # imports, and the process that decodes
    tracemalloc.start()
    result = written(plan, _SHARD_BYTES)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    stored_bytes = sum(shard.size_bytes for shard in result.shards)
    assert stored_bytes > 7 * _SHARD_BYTES and max(shard.size_bytes for shard in result.shards) < 1.1 * _SHARD_BYTES
    # Twice what the shards may hold, open chunks of three splits, and a megabyte for all else.
    assert peak_bytes < 2 * _SHARD_BYTES + 3 * 300_000 + 1_000_000


@pytest.mark.parametrize("kind", ["folders", "zip"])
def test_chunks_and_sums_are_those_of_a_unit_that_is_held_whole(kind: str, tmp_path: Path):
    plan = one_unit(tmp_path / "images", kind, formats=("parquet", "tfrecord"))
    whole, cut = written(plan, 100_000_000), written(plan, _SHARD_BYTES)
    assert len(whole.shards) == 2 * len(whole.splits) == 6 and len(cut.shards) > 14
    assert chunks_of(cut) == chunks_of(whole)
    assert (cut.splits, cut.accepted_key_sum, cut.note_counts) == (
        whole.splits, whole.accepted_key_sum, whole.note_counts
    )  # fmt: skip
    # The same chunks in the same shards of every format, in layout order.
    places = [(shard.split, shard.path.rpartition("-")[0]) for shard in cut.shards if shard.format == "tfrecord"]
    assert places == [(shard.split, shard.path.rpartition("-")[0]) for shard in cut.shards if shard.format == "parquet"]
    assert places == sorted(places)


def test_images_of_an_archive_that_do_not_fit_in_memory_wait_in_the_scratch_folder(tmp_path: Path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    plan = one_unit(tmp_path / "images", "zip", scratch_dir=str(scratch))
    cut = written(plan, _SHARD_BYTES)
    assert list(scratch.iterdir()) == []
    scratch.rmdir()
    # What fits in memory needs no folder.
    assert chunks_of(written(plan, 100_000_000)) == chunks_of(cut)
    with pytest.raises(StorageError, match=r"scratch does not exist on host .*etl\.scratch_dir"):
        written(plan, _SHARD_BYTES)


class Photos:
    """A source of names without files, each listed with a size."""

    uri = "nowhere"

    def __init__(self, num_images: int, size_bytes: int) -> None:
        self._images = [SourceImage(f"{number}.jpg", size_bytes) for number in range(num_images)]

    def list(self):
        yield ListingBatch(listed_table(self._images))


@pytest.mark.parametrize(
    ("size_bytes", "etl", "largest_bytes", "least_bytes"),
    [
        # What keeps its size follows the listed sizes, whatever image_size is.
        (1_900_000, {"resize_mode": "none"}, 128_000_000, 16_000_000),
        (1_900_000, {"resize_mode": "none", "image_size": 8192}, 128_000_000, 16_000_000),
        (40_000, {"resize_mode": "none"}, 128_000_000, 10_000_000),
        # What is only shrunk is no larger than it was: a limit far above the sources makes no tiny units.
        (40_000, {"resize_mode": "shorter", "image_size": 8192}, 128_000_000, 10_000_000),
        (40_000, {"resize_mode": "longer", "image_size": 8192}, 128_000_000, 10_000_000),
    ],
)
def test_units_of_images_that_keep_their_sizes_follow_the_listed_sizes(
    size_bytes: int, etl: dict, largest_bytes: int, least_bytes: int
):
    listing = list_source(Photos(30_000, size_bytes), seed=0, max_source_bytes=10**8, observer=SilentObserver())
    units = plan_units(listing, EtlConfig(**etl), "config")
    sizes = [unit.num_images * size_bytes for unit in units]
    # Equal ranges of hashes hold about equal numbers of images.
    assert max(sizes) < 1.5 * largest_bytes and min(sizes) > least_bytes / 2


_SETTINGS = EtlConfig(
    engine=HERE, image_size=8, encoding="png", stratified_splits=True,
    split_fractions=SplitFractions(train=0.7, validation=0.2, test=0.1),
)  # fmt: skip


def tree_of(images: str, dataset: str, etl: EtlConfig) -> EtlTree:
    return EtlTree(source=SourceConfig(uri=images), dataset=DatasetConfig(uri=dataset), etl=etl)


def build(images: str, dataset: str, etl: EtlConfig) -> None:
    build_dataset(tree_of(images, dataset, etl), run_id=uuid.uuid4().hex)


def splits_of(dataset: str) -> dict[str, tuple[str, int]]:
    """Source -> split and class."""
    opened = open_dataset(dataset)
    return {
        row["source"]: (split, row["label"])
        for split in opened.manifest.splits
        for file in opened.files(split, "parquet")
        for row in pq.read_table(file, columns=["source", "label"]).to_pylist()
    }


def grow(folder: Path, num_images: int, seed: int) -> None:
    write_images(folder / f"more{seed}", num_images=num_images, num_classes=4, seed=seed)
    for file in (folder / f"more{seed}").rglob("*.png"):
        shutil.copy(file, folder / "images" / file.parent.name / f"{seed}-{file.name}")


def check_shares(found: dict[str, tuple[str, int]]) -> None:
    counts = Counter(found.values())
    for label in range(4):
        num_images = sum(times for (_, each), times in counts.items() if each == label)
        for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
            assert abs(counts[split, label] - share * num_images) <= 2, counts
    for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
        assert abs(sum(each == split for each, _ in found.values()) / len(found) - share) <= 0.01, counts


def test_each_class_has_its_shares_and_no_image_moves(tmp_path: Path):
    write_images(tmp_path / "images", num_images=74, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    build(images, dataset, _SETTINGS)
    before = splits_of(dataset)
    check_shares(before)
    # Nothing has changed, so nothing is made.
    build(images, dataset, _SETTINGS)
    assert open_dataset(dataset).pin.version == 1
    grow(tmp_path, 53, seed=1)
    build(images, dataset, _SETTINGS)
    opened, after = open_dataset(dataset), splits_of(dataset)
    assert (opened.pin.version, opened.manifest.operation, len(after)) == (2, "incremental", 74 + 53)
    assert {source: after[source] for source in before} == before
    check_shares(after)


def test_turned_on_later_it_moves_nothing_and_evens_out_what_comes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    build(images, dataset, _SETTINGS.model_copy(update={"stratified_splits": False}))
    before = splits_of(dataset)
    grow(tmp_path, 200, seed=2)
    build(images, dataset, _SETTINGS)
    after = splits_of(dataset)
    assert open_dataset(dataset).manifest.operation == "incremental"
    assert {source: after[source] for source in before} == before
    check_shares(after)


@pytest.mark.parametrize("is_stratified", [True, False])
def test_a_build_goes_behind_the_version_that_its_splits_count(tmp_path: Path, is_stratified: bool):
    write_images(tmp_path / "images", num_images=40, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    config = _SETTINGS.model_copy(update={"stratified_splits": is_stratified})
    build(images, dataset, config)
    grow(tmp_path, 20, seed=1)

    class Rival:
        """Commits version 2 once the listing has begun."""

        def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
            if name == "list.progress" and open_dataset(dataset).pin.version == 1:
                build(images, dataset, config)

    plan = plan_build(tree_of(images, dataset, config), run_id="late", observer=Rival())
    assert open_dataset(dataset).pin.version == 2
    # Without strata the listing asks for none, and the plan goes behind the newest.
    assert plan.parent_version == (1 if is_stratified else 2)


def test_quotas_add_up_and_no_new_image_is_lost():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    for _ in range(300):
        shares = [generator.random() for _ in range(3)]
        shares = [share / sum(shares) for share in shares]
        carried, all_images, all_wanted = [0.0] * 3, 0, [0] * 3
        for _ in range(20):
            num_new, held = generator.randrange(9), [generator.randrange(4) for _ in range(3)]
            num_all = num_new + sum(held)
            ideals = [share * num_all + carry for share, carry in zip(shares, carried, strict=True)]
            wanted = whole_quotas(ideals, num_all)
            carried = [ideal - want for ideal, want in zip(ideals, wanted, strict=True)]
            assert sum(wanted) == num_all and min(wanted) >= 0
            assert all(abs(want - share * num_all) <= 2 for want, share in zip(wanted, shares, strict=True))
            remaining = share_out(wanted, held, num_new)
            assert sum(remaining) == num_new and min(remaining) >= 0
            all_images += num_all
            all_wanted = [total + want for total, want in zip(all_wanted, wanted, strict=True)]
        assert all(abs(total - share * all_images) <= 2 for total, share in zip(all_wanted, shares, strict=True))


SIZES = [(20 + number % 7, 30 - number % 5) for number in range(60)]


def write_source(folder: Path, sizes: list[tuple[int, int]]) -> SourceConfig:
    for number, (height, width) in enumerate(sizes):
        path = folder / f"class_{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.RandomState(number).randint(0, 9, (height, width, 3)).astype(np.uint8)
        assert cv2.imwrite(str(path), photo(height, width) // 2 + noise)
    return SourceConfig(uri=str(folder))


def stored_sizes(dataset: Dataset) -> dict[str, tuple[int, int]]:
    """As every plain tool finds them."""
    tables = [pq.read_table(uri) for split in dataset.manifest.splits for uri in dataset.files(split, "parquet")]
    return {row["source"]: (row["height"], row["width"]) for table in tables for row in table.to_pylist()}


@pytest.fixture(scope="module", params=["png", "jpeg"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Built, committed and verified in every format; `build_source` reads each byte again."""
    folder = tmp_path_factory.mktemp("sizes")
    source = write_source(folder / "images", SIZES)
    build_source(source, folder / "dataset", resize_mode="shorter", encoding=request.param, image_size=16)
    return open_dataset(str(folder / "dataset"))


def test_every_row_has_its_own_size(dataset: Dataset) -> None:
    found = stored_sizes(dataset)
    for number, (height, width) in enumerate(SIZES):
        shorter = min(height, width)
        expected = tuple((side * 16 + shorter // 2) // shorter for side in (height, width))
        assert found[f"class_{number % 2}/{number:03d}.png"] == expected
    assert len(set(found.values())) >= 8
    train = dataset.files("train", "parquet")
    heights_and_widths = [row for uri in train for row in pq.read_table(uri, columns=["height", "width"]).to_pylist()]
    num_pixels = sum(row["height"] * row["width"] for row in heights_and_widths)
    assert dataset.manifest.channel_sums.num_pixels == num_pixels


@pytest.mark.parametrize("format_name", SHARD_FORMATS)
def test_samples_are_read_and_batches_are_refused_with_the_fix(dataset: Dataset, format_name: str) -> None:
    found = stored_sizes(dataset)
    for sample in read_samples(dataset, "train", 10):
        assert sample.image_HWC.shape[:2] == found[sample.source]
    spec = dataset.plan_spec("train", seed=0, global_batch_size=4, num_streams=1)
    with pytest.raises(UsageError, match="different sizes.*batches need images of one shape.*crop, pad or stretch"):
        read_batches(dataset, dataset.plan_epoch(spec, 0))


def test_later_and_compacted_versions_carry_the_sizes_on(tmp_path: Path) -> None:
    source = write_source(tmp_path / "images", SIZES)
    build_source(source, tmp_path / "dataset", resize_mode="none")
    (tmp_path / "images" / "class_0" / "000.png").unlink()
    write_source(tmp_path / "more", [(41, 17)] * 2)
    (tmp_path / "more" / "class_0" / "000.png").rename(tmp_path / "images" / "class_0" / "new.png")
    later = build_source(source, tmp_path / "dataset", resize_mode="none")
    assert later.version == 2
    verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).raise_if_failed()
    fresh = build_source(source, tmp_path / "fresh", resize_mode="none")
    assert later.content_digest == fresh.content_digest
    assert later.channel_sums == fresh.channel_sums
    sizes = stored_sizes(open_dataset(str(tmp_path / "dataset")))
    assert sizes["class_0/new.png"] == (41, 17)

    compact_dataset(open_dataset(str(tmp_path / "dataset")), "compacting")
    compacted = open_dataset(str(tmp_path / "dataset"))
    assert (compacted.pin.version, compacted.manifest.content_digest) == (3, fresh.content_digest)
    verify_dataset(compacted, deep=True).raise_if_failed()
    assert stored_sizes(compacted) == sizes


def test_an_image_that_declares_more_than_the_options_allow_is_not_decoded(dataset: Dataset) -> None:
    options = dataset.manifest.normalize.model_copy(update={"encoding": "png", "max_aspect_ratio": 2.0})
    decode_row(png(photo(16, 30)), options)
    with pytest.raises(IntegrityError, match="at most 528 pixels"):
        decode_row(png(photo(600, 600)), options)
    with pytest.raises(IntegrityError, match="does not decode"):
        decode_row(b"\x89PNG", options)
