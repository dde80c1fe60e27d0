"""Images of different sizes: built, verified, carried on, read as files; and refused where one size is needed."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats import SHARD_FORMATS
from shardmill.formats.encodings import decode_row
from shardmill.loader.reader import read_batches
from shardmill.loader.samples import read_samples
from tests.etl.building import build_source
from tests.shardmill.images.make import photo, png

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
