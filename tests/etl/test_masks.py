"""Masks and segmentations of images: they are read, stored and returned with the image that they belong to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.path import Path as Polygon
from PIL import Image

import shardmill
from etl.config import BoxesConfig, SourceConfig
from etl.sources.annotations import ANNOTATED_SIZE, SEGMENTATIONS
from etl.units.after_decoding import Annotated
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.encodings import decode_row, decode_stored_mask, encode_mask
from shardmill.images.annotations import Segmentation, decode_mask, draw_segmentations, polygon_of, run_lengths_of
from shardmill.images.pixels import Refused
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.pictures import picture_of
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.typed_columns import encode_values
from shardmill.values import Rejection, RejectReason, SourceImage
from tests.etl.annotations import (
    MODES,
    NUM_IMAGES,
    ROWS,
    SHAPES,
    as_png,
    as_table,
    drawn,
    found_in,
    mask_of,
    places_of,
    rectangle,
    with_masks,
)
from tests.etl.building import annotated, build_source, list_images
from tests.etl.incremental import build_from
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
    build_from(as_table(tmp_path), tmp_path / "dataset", image_size=32)
    source = as_table(tmp_path)
    (tmp_path / "masks" / "3-8.png").write_bytes(mask_of(64, 64, [0, 0, 9, 9], 8))
    table = (tmp_path / "t.jsonl").read_text().replace("3-7.png", "3-8.png").replace("4-7.png", "none.png")
    (tmp_path / "t.jsonl").write_text(table)
    after = build_from(source, tmp_path / "dataset", image_size=32, max_reject_fraction=0.2)
    assert after.manifest.operation == "incremental" and after.manifest.counts.by_reason == {"bad_mask": 1}
    compact_dataset(open_dataset(str(tmp_path / "dataset")), "c")
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    verify_dataset(opened, deep=True).raise_if_failed()
    values = {sample.source: int(sample["mask"].max()) for sample in opened.samples("train")}
    assert values == {f"{number}.png": 8 if number == 3 else 7 for number in range(NUM_IMAGES) if number != 4}
    # What was refused is read again once it is there.
    (tmp_path / "masks" / "none.png").write_bytes(mask_of(64, 64, [0, 0, 9, 9], 9))
    last = build_from(source, tmp_path / "dataset", image_size=32)
    full = build_from(source, tmp_path / "full", image_size=32)
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
    build_from(part, tmp_path / "one", image_size=16)
    # A mask in a row whose image is the same.
    changed = [*masks[:3], mask_of(64, 64, [0, 0, 64, 64], 9), *masks[4:]]
    again = {**columns, "outline": pa.StructArray.from_arrays([pa.array(changed)], ["bytes"])}
    pq.write_table(pa.table(again), tmp_path / "t.parquet", row_group_size=4)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for dataset, detect in (("one", "stat"), ("two", "content")):
        after = build_from(part, tmp_path / dataset, image_size=16, detect_changes=detect).manifest
        opened = shardmill.open_dataset(str(tmp_path / dataset))
        found = {sample.source[-5:]: sample["mask"].max() for split in after.splits for sample in opened.samples(split)}
        assert after.version == 2 and found["3.png"] == 9 and sum(value == 7 for value in found.values()) == 8
    # Rows written again as they were.
    os.utime(tmp_path / "t.parquet", ns=(1, 1))
    touched = build_from(part, tmp_path / "two", image_size=16, detect_changes="content")
    assert (touched.manifest.version, touched.num_images_read) == (2, NUM_IMAGES)
    other = part.model_copy(update={"mask_field": "other"})
    after = build_from(other, tmp_path / "one", image_size=16, max_reject_fraction=0.2).manifest
    assert after.version == 3 and after.counts.by_reason == {"bad_mask": 1}
    with pytest.raises(UsageError, match="source.mask_field = 'none' is not a column"):
        list_images(part.model_copy(update={"mask_field": "none"}))


# Of pycocotools 2.0.11: `encode` of a 7 x 5 mask (height x width) with rows 2 to 4 of columns 1 to 3, and its counts.
COMPRESSED, COUNTS = "9340005", [9, 3, 4, 3, 4, 3, 9]
# And of a 70 x 12 mask, whose differences are also negative, and of several characters.
LONGER = r"X2`1f0000\8cNQI00000:", [72, 48, 22, 48, 22, 48, 290, 3, 67, 3, 67, 3, 67, 3, 77]


def segmentation(value: int, *polygons: list[float], is_crowd: bool = False) -> Segmentation:
    return Segmentation(value, is_crowd, tuple(map(polygon_of, polygons)))


def test_a_pixel_belongs_to_the_polygon_around_its_centre() -> None:
    height, width, rng = 40, 60, np.random.default_rng(seed := 29)
    y, x = np.mgrid[:height, :width] + 0.5
    for _ in range(40):
        # Some reach beyond the image.
        angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 30)))
        radii = rng.uniform(1, 45, len(angles))[:, None]
        corners_P2 = rng.uniform(-5, 60, 2) + radii * np.stack([np.cos(angles), np.sin(angles)], 1)
        closed = Polygon(np.concatenate([corners_P2, corners_P2[:1]]), closed=True)
        expected = closed.contains_points(np.stack([x.ravel(), y.ravel()], 1)).reshape(height, width)
        mask_HW = draw_segmentations([segmentation(9, corners_P2.ravel().tolist())], height, width)
        assert ((mask_HW == 9) == expected).all() and mask_HW.max(initial=0) in (0, 9), seed


def test_run_lengths_as_numbers_and_as_text() -> None:
    expected = np.zeros((7, 5), np.uint8)
    expected[2:5, 1:4] = 4
    for counts in (COUNTS, COMPRESSED):
        assert (draw_segmentations([Segmentation(4, False, (), run_lengths_of(counts))], 7, 5) == expected).all()
    assert run_lengths_of(LONGER[0]).tolist() == LONGER[1]
    for bad in ("", "9434é", "9P", [], [1, -1], ["a"], [1.5]):
        with pytest.raises(Refused, match="run lengths"):
            run_lengths_of(bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match="do not add up to 5x8"):
        draw_segmentations([Segmentation(4, False, (), run_lengths_of(COUNTS))], 8, 5)


def test_the_smaller_segmentation_is_on_top_and_crowds_are_below() -> None:
    large, small = segmentation(1, rectangle(0, 0, 8, 8)), segmentation(2, rectangle(2, 2, 4, 4), rectangle(6, 6, 9, 9))
    crowd = segmentation(3, rectangle(3, 3, 5, 5), is_crowd=True)
    found = [draw_segmentations(each, 10, 10) for each in ([large, small, crowd], [crowd, small, large])]
    assert (found[0] == found[1]).all()
    assert np.bincount(found[0].ravel()).tolist() == [100 - 64 - 5, 64 - 8, 13]
    assert draw_segmentations([small, segmentation(5, rectangle(2, 2, 4, 4), rectangle(6, 6, 9, 9))], 10, 10).max() == 5
    assert not draw_segmentations(
        [segmentation(1, [3, 3, 3, 3, 3, 3]), segmentation(1, rectangle(20, 20, 30, 30))], 10, 10
    ).any()


def test_segmentations_that_cross_too_many_rows_are_not_drawn() -> None:
    zigzag = np.stack([np.linspace(0, 3000, 20_000), np.arange(20_000) % 2 * 3000], 1).ravel().tolist()
    with pytest.raises(Refused, match="the segmentations cross 60000000 rows of pixels; at most 16777216 are drawn"):
        draw_segmentations([segmentation(1, zigzag)], 3000, 3000)
    # A fifth of them: teeth on both sides of the edge that closes the polygon.
    mask_HW = draw_segmentations([segmentation(1, zigzag[: 2 * 4_000])], 3000, 3000)
    assert 0.32 < mask_HW[:, :600].mean() < 0.34 and not mask_HW[:, 601:].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_drawn_mask_lies_where_its_pixels_are(mode: str) -> None:
    height, width, box = 60, 90, [18, 20, 63, 50]
    options = NormalizeOptions(image_size=48, resize_mode=mode, encoding="png")  # pyright: ignore[reportArgumentType]
    for orientation in (1, 3, 6, 8):
        found = moved_segmentations(
            drawn(height, width, box, orientation), [[7, 0, [rectangle(*box)]]], [width, height], options
        )
        assert isinstance(found, Annotated)
        image_HWC = decode_row(found.sample.image, options)
        mask_HW = decode_stored_mask(found.mask, (image_HWC.shape[0], image_HWC.shape[1]))
        pixels = found_in(image_HWC)
        assert pixels is not None and np.abs(np.subtract(places_of(mask_HW), pixels)).max() <= 1


def moved_segmentations(
    data: bytes, segmentations: list[Any], size: list[int], options: NormalizeOptions
) -> Annotated | Rejection:
    boxed = [[value, is_crowd, None, region] for value, is_crowd, region in segmentations]
    values = {SEGMENTATIONS: json.dumps(boxed), ANNOTATED_SIZE: size}
    source = SourceImage("a.png", len(data), extra=encode_values(values))  # pyright: ignore[reportArgumentType]
    return annotated(source, data, options)


def test_what_is_no_segmentation_rejects_its_image() -> None:
    data = drawn(20, 40, [1, 1, 9, 9])
    for region, size, problem in (
        ([[1, 2, 3, 4]], [40, 20], "at least three corners"),
        ([[1, 2, 3, 4, 5, float("nan")]], [40, 20], "at least three corners"),
        ([[1, 2, 3, 4, 5, None]], [40, 20], "at least three corners"),
        (["a"], [40, 20], "at least three corners"),
        ("a", [40, 20], "is no polygon"),
        ({"counts": [800], "size": [40, 20]}, [40, 20], "the size (height, width) of its run lengths is [40, 20]"),
        ([rectangle(0, 0, 9, 9)], [10**6, 10**6], "the image has 40x20"),
    ):
        found = moved_segmentations(data, [[7, 0, region]], size, NormalizeOptions())
        assert isinstance(found, Rejection) and problem in found.detail, region


def test_a_dataset_has_the_segmentations_of_its_annotations(tmp_path: Path) -> None:
    first = build_from(with_masks(tmp_path, {}), tmp_path / "dataset", image_size=20).manifest
    assert first.columns["mask"] == "png" and first.columns["boxes"] == "list<box>"
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    masks = {sample.source[-5]: sample["mask"] for split in first.splits for sample in opened.samples(split)}
    # The middle 20 x 20 of 40 x 20, with the ids of cat (17) and dog (18); below them a crowd of cats.
    expected = np.full((20, 20), 17)
    expected[4:12, 10:] = 18
    expected[4:10, 10:12] = 17
    assert (masks["0"] == expected).all()
    assert set(np.unique(masks["1"])) == {0, 18} and not masks["2"].any() and not masks["3"].any()
    # A later run makes the image again whose segmentation is another.
    again = build_from(with_masks(tmp_path, {}), tmp_path / "dataset", image_size=20)
    assert again.manifest.version == first.version
    runs = {"counts": [365, 4, 431], "size": [20, 40]}
    source = with_masks(tmp_path, {2: runs})
    after = build_from(source, tmp_path / "dataset", image_size=20, resize_mode="crop").manifest
    assert after.operation == "incremental"
    full = build_from(source, tmp_path / "full", image_size=20).manifest
    assert after.content_digest == full.content_digest != first.content_digest


@pytest.mark.starts("decoder")
def test_a_mask_beyond_the_limits_of_decoding_rejects_its_image(tmp_path: Path) -> None:
    source = with_masks(tmp_path, {})
    content = json.loads(Path(source.uri).read_text())
    assert cv2.imwrite(str(tmp_path / "val2017" / "1.png"), np.zeros((1500, 1500, 3), np.uint8))
    content["images"][1] |= {"width": 1500, "height": 1500}
    box = next(each for each in content["annotations"] if each["image_id"] == 1)
    runs = {"counts": [0, 1500 * 1500], "size": [1500, 1500]}
    content["annotations"] += [{**box, "bbox": [0, 0, 1500, 1500], "segmentation": runs}] * 300
    Path(source.uri).write_text(json.dumps(content))
    manifest = build_from(source, tmp_path / "dataset", image_size=20, decode_timeout_seconds=0.5).manifest
    [refused] = read_rejections(open_store(str(tmp_path / "dataset")), manifest)
    assert manifest.counts.by_reason == {"bad_mask": 1} and manifest.counts.accepted == len(ROWS) - 1
    assert refused.detail == "its mask takes more than 0.5 s; etl.decode_timeout_seconds is the limit"


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    listing = list_images(with_masks(tmp_path, {0: [], 1: None}))
    assert any(each.startswith("2 annotations") and "no segmentation" in each for each in listing.warnings)
    source = with_masks(tmp_path, {number: [] for number in range(9)})
    with pytest.raises(UsageError, match="has no segmentations, and source.coco_masks = true"):
        list_images(source)
    for value in (0, 256, "a"):
        source = with_masks(tmp_path, {})
        content = json.loads(Path(source.uri).read_text())
        content["annotations"][1]["category_id"] = value
        Path(source.uri).write_text(json.dumps(content))
        with pytest.raises(UsageError, match=f"segmentations of the category {value!r}"):
            list_images(source)


@pytest.mark.parametrize(
    ("segmentation", "is_refused"),
    [
        ([rectangle(10, 4, 30, 12)], False),
        # Rounded, or drawn less exactly than its box.
        ([rectangle(9, 3, 31, 13)], False),
        ([rectangle(12, 5, 20, 8), rectangle(28, 9, 30, 12)], False),
        ([[10, 4, 30, 4, 30, 4]], False),
        # y before x; one of them lies outside of the image altogether.
        ([rectangle(4, 10, 12, 30)], True),
        ([rectangle(10, 4, 30, 12), rectangle(4, 10, 12, 18)], True),
        ([rectangle(4, 25, 12, 35)], True),
        ({"counts": [204, 8, *[12, 8] * 19, 208], "size": [20, 40]}, False),
        # The same pixels, row by row.
        ({"counts": [170, 20, *[20, 20] * 7, 330], "size": [20, 40]}, True),
    ],
)
def test_a_segmentation_lies_in_its_box(segmentation: Any, is_refused: bool, tmp_path: Path) -> None:
    source = with_masks(tmp_path, {2: segmentation})
    content = json.loads(Path(source.uri).read_text())
    content["annotations"][2]["bbox"] = [10, 4, 20, 8]
    Path(source.uri).write_text(json.dumps(content))
    manifest = build_source(source, tmp_path / "dataset", resize_mode="none", max_reject_fraction=0.5)
    assert manifest.counts.by_reason == ({"bad_mask": 1} if is_refused else {})
