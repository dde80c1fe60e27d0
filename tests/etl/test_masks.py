"""Masks move with the pixels, without interpolation: a shape that is drawn into both lies at the same place in both."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardmill
from etl.boxes_config import BoxesConfig
from etl.config import SourceConfig
from etl.units.move_annotations import Annotated
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.encodings import decode_row, decode_stored_mask, encode_mask
from shardmill.images.masks import decode_mask
from shardmill.images.pixels import Refused
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.drawn import picture_of
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import encode_values
from shardmill.values import Rejection, RejectReason, SourceImage
from tests.etl.annotations import MODES, NUM_IMAGES, SHAPES, as_png, as_table, drawn, found_in, mask_of, places_of
from tests.etl.building import annotated, build_source, list_images
from tests.etl.extra_columns import build
from tests.lab.augmentations import AUGMENTATIONS


def moved(data: bytes, mask: bytes, options: NormalizeOptions) -> Annotated | Rejection:
    source = SourceImage("a.png", len(data), extra=encode_values({"mask": "m.png"}))
    return annotated(source, data, options, mask)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_lies_where_its_pixels_are(mode: str) -> None:
    for (height, width), orientation in ((shape, turn) for shape in SHAPES for turn in (1, 3, 6, 8)):
        box = [width // 5, height // 3, width // 5 + width // 2, height // 3 + height // 2]
        options = NormalizeOptions(image_size=64, resize_mode=mode, encoding="png")  # pyright: ignore[reportArgumentType]
        # Of the upright image, or with the sides of the file's own pixels.
        for turn in {1, orientation if orientation > 4 else 1}:
            found = moved(
                drawn(height, width, box, orientation), mask_of(height, width, box, orientation=turn), options
            )
            assert isinstance(found, Annotated)
            image_HWC = decode_row(found.sample.image, options)
            mask_HW = decode_stored_mask(found.mask, (image_HWC.shape[0], image_HWC.shape[1]))
            pixels = found_in(image_HWC)
            assert set(np.unique(mask_HW)) == {0, 7} and pixels is not None
            assert np.abs(np.subtract(places_of(mask_HW), pixels)).max() <= 1


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_values_are_numbers_whatever_their_colours(bits: int) -> None:
    values_HW = (np.arange(64).reshape(8, 8) % (1 << bits)).astype(np.uint8)
    image = Image.fromarray(values_HW)
    image.putpalette(bytes(range(255, -1, -1)) * 3)
    assert (decode_mask(as_png(image, bits=bits)) == values_HW).all()
    if bits == 8:
        assert (decode_mask(as_png(Image.fromarray(values_HW))) == values_HW).all()
    assert (decode_stored_mask(encode_mask(values_HW), (8, 8)) == values_HW).all()


def test_what_is_no_mask_is_refused() -> None:
    data, options = drawn(20, 40, [1, 1, 9, 9]), NormalizeOptions()
    good = mask_of(20, 40, [1, 1, 9, 9])
    bad = {
        "not a PNG": b"GIF89a",
        "of at most 8 bits": data,
        "20x40 pixels; the image has 40x20": mask_of(40, 20, [1, 1, 9, 9]),
        "chunk IDAT": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "no IEND": good[:-5],
    }
    for problem, mask in bad.items():
        found = moved(data, mask, options)
        assert isinstance(found, Rejection) and problem in found.detail, problem
    with pytest.raises(Refused):
        decode_mask(b"\x89PNG\r\n\x1a\n")
    for stored in (b"", good, encode_mask(np.zeros((3, 4), np.uint8))[:-8]):
        with pytest.raises(IntegrityError, match="a stored mask"):
            decode_stored_mask(stored, (3, 4))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> LoadableDataset:
    folder = tmp_path_factory.mktemp("masks")
    manifest = build_source(as_table(folder), folder / "dataset", image_size=64)
    assert manifest.columns["mask"] == "png" and manifest.class_names == ("red",)
    return shardmill.open_dataset(str(folder / "dataset"))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_masks_follow_the_pixels_of_a_batch(dataset: LoadableDataset, augmentation: str, format: str) -> None:
    loader = dataset.batches(
        "train", global_batch_size=4, augment=AUGMENTATIONS[augmentation], format=format, num_streams=1
    )
    num_found = 0
    for batch in loader:
        assert batch["mask"].shape == batch.images.shape[:3] and batch["mask"].dtype == np.uint8
        for row, weight in enumerate(batch.weights):
            found, mask_HW = found_in(batch.images[row]), batch["mask"][row]
            if not weight:
                assert not mask_HW.any()
            elif found is not None and min(found[2] - found[0], found[3] - found[1]) > 1:
                assert set(np.unique(mask_HW)) <= {0, 7}
                assert np.abs(np.subtract(places_of(mask_HW), found)).max() <= 1
                num_found += 1
    assert num_found > NUM_IMAGES // 2


def test_samples_tensors_and_metadata(dataset: LoadableDataset) -> None:
    torch = pytest.importorskip("torch")
    sample = dataset.samples("train")[0]
    assert sample["mask"].shape == sample.image_HWC.shape[:2]
    batch = next(iter(dataset.torch_loader("train", global_batch_size=4)))
    assert torch.is_tensor(batch["mask"]) and batch.to("cpu")["mask"].shape == (4, 64, 64)
    tinted = np.asarray(picture_of(sample.image_HWC, {"mask": sample["mask"]}, 64)).astype(int)
    assert ((tinted != sample.image_HWC).any(2) == (sample["mask"] > 0)).all()
    assert "mask" not in dataset.metadata("train").column_names


def test_parts_of_a_batch_decode_its_masks(dataset: LoadableDataset) -> None:
    # Nine rows in steps of four, so that a part of the last one is padding.
    spec = dataset.plan_spec("train", seed=3, global_batch_size=4, num_streams=2)
    found = []
    for part_bytes in (1, 4_000_000):
        options, augment = ReaderOptions(num_threads=3, part_bytes=part_bytes), AUGMENTATIONS["imagenet"]
        with read_batches(dataset, dataset.plan_epoch(spec, 1), options=options, augment=augment) as batches:
            found.append([batch.extra for batch in batches])
    for parts, whole in zip(*found, strict=True):
        np.testing.assert_array_equal(parts["mask"], whole["mask"])
        np.testing.assert_array_equal(parts["boxes"].sides, whole["boxes"].sides)
    assert sum(int(whole["mask"].any()) for whole in found[1]) >= 2


def test_a_tf_dataset_has_masks(dataset: LoadableDataset) -> None:
    pytest.importorskip("tensorflow")
    reading: dict = {"global_batch_size": 4, "augment": AUGMENTATIONS["size"], "columns": ["mask"]}
    rows = dataset.tf_dataset("train", annotations=True, **reading)
    assert rows.element_spec[1].keys() == {"labels", "mask"} and rows.element_spec[1]["mask"].shape == (4, 40, 40)
    for batch, (images, labels, _) in zip(dataset.batches("train", **reading), rows, strict=True):
        np.testing.assert_array_equal(labels["mask"], batch["mask"])
        np.testing.assert_array_equal(images, batch.images)


def test_later_runs_carry_masks_and_see_other_files(tmp_path: Path) -> None:
    build(as_table(tmp_path), tmp_path / "dataset", image_size=32)
    source = as_table(tmp_path)
    (tmp_path / "masks" / "3-8.png").write_bytes(mask_of(64, 64, [0, 0, 9, 9], 8))
    table = (tmp_path / "t.jsonl").read_text().replace("3-7.png", "3-8.png").replace("4-7.png", "none.png")
    (tmp_path / "t.jsonl").write_text(table)
    after = build(source, tmp_path / "dataset", image_size=32, max_reject_fraction=0.2)
    assert after.manifest.operation == "incremental" and after.manifest.counts.by_reason == {"bad_mask": 1}
    compact_dataset(open_dataset(str(tmp_path / "dataset")), "c")
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    verify_dataset(opened, deep=True).raise_if_failed()
    values = {sample.source: int(sample["mask"].max()) for sample in opened.samples("train")}
    assert values == {f"{number}.png": 8 if number == 3 else 7 for number in range(NUM_IMAGES) if number != 4}
    # What was refused is read again once it is there.
    (tmp_path / "masks" / "none.png").write_bytes(mask_of(64, 64, [0, 0, 9, 9], 9))
    last = build(source, tmp_path / "dataset", image_size=32)
    full = build(source, tmp_path / "full", image_size=32)
    assert last.manifest.content_digest == full.manifest.content_digest


def test_reasons_are_those_of_masks() -> None:
    found = moved(drawn(20, 40, [1, 1, 9, 9]), b"no", NormalizeOptions())
    assert isinstance(found, Rejection) and found.reason is RejectReason.BAD_MASK


def test_parts_have_masks_of_their_own(tmp_path: Path) -> None:
    parts = {}
    for name, value in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        parts[name] = as_table(tmp_path / name, value)
    build_source(SourceConfig(kind="several", parts=parts), tmp_path / "dataset")
    samples = shardmill.open_dataset(str(tmp_path / "dataset")).samples("train")
    values = {(sample.source[0], int(sample["mask"].max())) for sample in samples}
    assert len(samples) == 2 * NUM_IMAGES and values == {("a", 3), ("b", 5)}


def test_rows_of_parquet_hold_masks(tmp_path: Path) -> None:
    """In parts, too; the same ones as those of a table, and again if another column is named."""
    (tmp_path / "table").mkdir()
    table = as_table(tmp_path / "table")
    rows = [json.loads(line) for line in (tmp_path / "table" / "t.jsonl").read_text().splitlines()]
    masks = [(tmp_path / "table" / row["outline"]).read_bytes() for row in rows]
    columns = {
        "key": [row["uri"] for row in rows], "image": [(tmp_path / "table" / row["uri"]).read_bytes() for row in rows],
        "outline": pa.StructArray.from_arrays([pa.array(masks)], ["bytes"]), "other": [*masks[:-1], None],
    }  # fmt: skip
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=4)
    part = SourceConfig(kind="parquet", uri=str(tmp_path / "t.parquet"), mask_field="outline", label_kind="none")
    without = table.model_copy(update={"boxes": BoxesConfig(), "label_kind": "none"})
    manifest = build_source(SourceConfig(kind="several", parts={"a": part, "b": without}), tmp_path / "both")
    opened = shardmill.open_dataset(str(tmp_path / "both"))
    samples = [sample for split in manifest.splits for sample in opened.samples(split)]
    by_name = {(sample.source[0], sample.source[-5:]): sample["mask"] for sample in samples}
    assert len(by_name) == 2 * NUM_IMAGES
    for row in rows:
        assert by_name["a", row["uri"]].any() and (by_name["a", row["uri"]] == by_name["b", row["uri"]]).all()
    build(part, tmp_path / "one", image_size=16)
    # A mask in a row whose image is the same.
    changed = [*masks[:3], mask_of(64, 64, [0, 0, 64, 64], 9), *masks[4:]]
    again = {**columns, "outline": pa.StructArray.from_arrays([pa.array(changed)], ["bytes"])}
    pq.write_table(pa.table(again), tmp_path / "t.parquet", row_group_size=4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for dataset, detect in (("one", "stat"), ("two", "content")):
        after = build(part, tmp_path / dataset, image_size=16, detect_changes=detect).manifest
        opened = shardmill.open_dataset(str(tmp_path / dataset))
        found = {sample.source[-5:]: sample["mask"].max() for split in after.splits for sample in opened.samples(split)}
        assert after.version == 2 and found["3.png"] == 9 and sum(value == 7 for value in found.values()) == 8
    # Rows written again as they were.
    os.utime(tmp_path / "t.parquet", ns=(1, 1))
    touched = build(part, tmp_path / "two", image_size=16, detect_changes="content")
    assert (touched.manifest.version, touched.num_images_read) == (2, NUM_IMAGES)
    other = part.model_copy(update={"mask_field": "other"})
    after = build(other, tmp_path / "one", image_size=16, max_reject_fraction=0.2).manifest
    assert after.version == 3 and after.counts.by_reason == {"bad_mask": 1}
    with pytest.raises(UsageError, match="source.mask_field = 'none' is not a column"):
        list_images(part.model_copy(update={"mask_field": "none"}))
