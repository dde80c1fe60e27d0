"""Outlines of COCO become masks: of the pixels whose centres they enclose, which move as the image's own do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from matplotlib.path import Path as Polygon

import shardmill
from etl.sources.boxes import ANNOTATED_SIZE
from etl.sources.mask_places import OUTLINES
from etl.units.move_annotations import Annotated
from shardmill.dataset.ledger import read_rejections
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_row, decode_stored_mask
from shardmill.images.outlines import Outline, draw_outlines, polygon_of, run_lengths_of
from shardmill.images.pixels import Refused
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.typed_columns import encode_values
from shardmill.values import Rejection, SourceImage
from tests.etl.annotations import MODES, ROWS, drawn, found_in, places_of, rectangle, with_masks
from tests.etl.building import annotated, build_source, list_images
from tests.etl.extra_columns import build

# Of pycocotools 2.0.11: `encode` of a 7 x 5 mask (height x width) with rows 2 to 4 of columns 1 to 3, and its counts.
COMPRESSED, COUNTS = "9340005", [9, 3, 4, 3, 4, 3, 9]
# And of a 70 x 12 mask, whose differences are also negative, and of several characters.
LONGER = r"X2`1f0000\8cNQI00000:", [72, 48, 22, 48, 22, 48, 290, 3, 67, 3, 67, 3, 67, 3, 77]


def outline(value: int, *polygons: list[float], is_crowd: bool = False) -> Outline:
    return Outline(value, is_crowd, tuple(map(polygon_of, polygons)))


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
        mask_HW = draw_outlines([outline(9, corners_P2.ravel().tolist())], height, width)
        assert ((mask_HW == 9) == expected).all() and mask_HW.max(initial=0) in (0, 9), seed


def test_run_lengths_as_numbers_and_as_text() -> None:
    expected = np.zeros((7, 5), np.uint8)
    expected[2:5, 1:4] = 4
    for counts in (COUNTS, COMPRESSED):
        assert (draw_outlines([Outline(4, False, (), run_lengths_of(counts))], 7, 5) == expected).all()
    assert run_lengths_of(LONGER[0]).tolist() == LONGER[1]
    for bad in ("", "9434é", "9P", [], [1, -1], ["a"], [1.5]):
        with pytest.raises(Refused, match="run lengths"):
            run_lengths_of(bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Refused, match="do not add up to 5x8"):
        draw_outlines([Outline(4, False, (), run_lengths_of(COUNTS))], 8, 5)


def test_the_smaller_outline_is_on_top_and_crowds_are_below() -> None:
    large, small = outline(1, rectangle(0, 0, 8, 8)), outline(2, rectangle(2, 2, 4, 4), rectangle(6, 6, 9, 9))
    crowd = outline(3, rectangle(3, 3, 5, 5), is_crowd=True)
    found = [draw_outlines(each, 10, 10) for each in ([large, small, crowd], [crowd, small, large])]
    assert (found[0] == found[1]).all()
    assert np.bincount(found[0].ravel()).tolist() == [100 - 64 - 5, 64 - 8, 13]
    assert draw_outlines([small, outline(5, rectangle(2, 2, 4, 4), rectangle(6, 6, 9, 9))], 10, 10).max() == 5
    assert not draw_outlines([outline(1, [3, 3, 3, 3, 3, 3]), outline(1, rectangle(20, 20, 30, 30))], 10, 10).any()


def test_outlines_that_cross_too_many_rows_are_not_drawn() -> None:
    zigzag = np.stack([np.linspace(0, 3000, 20_000), np.arange(20_000) % 2 * 3000], 1).ravel().tolist()
    with pytest.raises(Refused, match="the outlines cross 60000000 rows of pixels; at most 16777216 are drawn"):
        draw_outlines([outline(1, zigzag)], 3000, 3000)
    # A fifth of them: teeth on both sides of the edge that closes the polygon.
    mask_HW = draw_outlines([outline(1, zigzag[: 2 * 4_000])], 3000, 3000)
    assert 0.32 < mask_HW[:, :600].mean() < 0.34 and not mask_HW[:, 601:].any()


@pytest.mark.parametrize("mode", MODES)
def test_a_drawn_mask_lies_where_its_pixels_are(mode: str) -> None:
    height, width, box = 60, 90, [18, 20, 63, 50]
    options = NormalizeOptions(image_size=48, resize_mode=mode, encoding="png")  # pyright: ignore[reportArgumentType]
    for orientation in (1, 3, 6, 8):
        found = moved(drawn(height, width, box, orientation), [[7, 0, [rectangle(*box)]]], [width, height], options)
        assert isinstance(found, Annotated)
        image_HWC = decode_row(found.sample.image, options)
        mask_HW = decode_stored_mask(found.mask, (image_HWC.shape[0], image_HWC.shape[1]))
        pixels = found_in(image_HWC)
        assert pixels is not None and np.abs(np.subtract(places_of(mask_HW), pixels)).max() <= 1


def moved(data: bytes, outlines: list[Any], size: list[int], options: NormalizeOptions) -> Annotated | Rejection:
    boxed = [[value, is_crowd, None, region] for value, is_crowd, region in outlines]
    values = {OUTLINES: json.dumps(boxed), ANNOTATED_SIZE: size}
    source = SourceImage("a.png", len(data), extra=encode_values(values))  # pyright: ignore[reportArgumentType]
    return annotated(source, data, options)


def test_what_is_no_outline_rejects_its_image() -> None:
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
        found = moved(data, [[7, 0, region]], size, NormalizeOptions())
        assert isinstance(found, Rejection) and problem in found.detail, region


def test_a_dataset_has_the_outlines_of_its_annotations(tmp_path: Path) -> None:
    first = build(with_masks(tmp_path, {}), tmp_path / "dataset", image_size=20).manifest
    assert first.columns["mask"] == "png" and first.columns["boxes"] == "list<box>"
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    masks = {sample.source[-5]: sample["mask"] for split in first.splits for sample in opened.samples(split)}
    # The middle 20 x 20 of 40 x 20, with the ids of cat (17) and dog (18); below them a crowd of cats.
    expected = np.full((20, 20), 17)
    expected[4:12, 10:] = 18
    expected[4:10, 10:12] = 17
    assert (masks["0"] == expected).all()
    assert set(np.unique(masks["1"])) == {0, 18} and not masks["2"].any() and not masks["3"].any()
    # A later run makes the image again whose outline is another.
    again = build(with_masks(tmp_path, {}), tmp_path / "dataset", image_size=20)
    assert again.manifest.version == first.version
    runs = {"counts": [365, 4, 431], "size": [20, 40]}
    source = with_masks(tmp_path, {2: runs})
    after = build(source, tmp_path / "dataset", image_size=20, resize_mode="crop").manifest
    assert after.operation == "incremental"
    full = build(source, tmp_path / "full", image_size=20).manifest
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
    manifest = build(source, tmp_path / "dataset", image_size=20, decode_timeout_seconds=0.5).manifest
    [refused] = read_rejections(open_store(str(tmp_path / "dataset")), manifest)
    assert manifest.counts.by_reason == {"bad_mask": 1} and manifest.counts.accepted == len(ROWS) - 1
    assert refused.detail == "its mask takes more than 0.5 s; etl.decode_timeout_seconds is the limit"


def test_what_a_file_lacks_is_said(tmp_path: Path) -> None:
    listing = list_images(with_masks(tmp_path, {0: [], 1: None}))
    assert any(each.startswith("2 annotations") and "no outline" in each for each in listing.warnings)
    source = with_masks(tmp_path, {number: [] for number in range(9)})
    with pytest.raises(UsageError, match="has no outlines, and source.coco_masks = true"):
        list_images(source)
    for value in (0, 256, "a"):
        source = with_masks(tmp_path, {})
        content = json.loads(Path(source.uri).read_text())
        content["annotations"][1]["category_id"] = value
        Path(source.uri).write_text(json.dumps(content))
        with pytest.raises(UsageError, match=f"outlines of the category {value!r}"):
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
def test_an_outline_lies_in_its_box(segmentation: Any, is_refused: bool, tmp_path: Path) -> None:
    source = with_masks(tmp_path, {2: segmentation})
    content = json.loads(Path(source.uri).read_text())
    content["annotations"][2]["bbox"] = [10, 4, 20, 8]
    Path(source.uri).write_text(json.dumps(content))
    manifest = build_source(source, tmp_path / "dataset", resize_mode="none", max_reject_fraction=0.5)
    assert manifest.counts.by_reason == ({"bad_mask": 1} if is_refused else {})
