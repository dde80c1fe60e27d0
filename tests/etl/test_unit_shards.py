"""A unit of any size: what waits in memory is bounded, and its chunks do not depend on how much that is."""

from __future__ import annotations

import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.listing.list_source import list_source
from etl.plan import BuildPlan, plan_build
from etl.sources.listed import ListingBatch, listed_table
from etl.units.units import plan_units
from etl.units.write_unit import write_unit
from shardmill.dataset.unit_result import UnitResult
from shardmill.errors import StorageError
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.values import SourceImage

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
