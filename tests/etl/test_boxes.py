"""Boxes move with the pixels: a rectangle that is drawn into an image lies in the stored one where its box says."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image

from etl.sources.boxes import ANNOTATED_SIZE, box_values
from etl.units.move_annotations import Annotated
from shardmill.formats.encodings import decode_row
from shardmill.kernel import shardmill_native
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import decode_values, encode_values
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.etl.annotations import MODES, SHAPES, drawn, found_in
from tests.etl.building import annotated

KERNELS = ("wheels",) if shardmill_native is None else ("wheels", "native")


def moved(data: bytes, options: NormalizeOptions, values: dict[str, Any]) -> tuple[SourceImage, ImageSample]:
    source = SourceImage("a.png", len(data), extra=encode_values(values))
    found = annotated(source, data, options)
    assert isinstance(found, Annotated)
    return found.image, found.sample


@pytest.mark.parametrize("mode", MODES)
def test_a_rectangle_lies_where_its_box_says(mode: str) -> None:
    for (height, width), upscale, orientation in itertools.product(SHAPES, ("auto", "never"), range(1, 9)):
        if orientation % 2 == 0 and upscale == "never":
            continue
        box = [width // 5, height // 3, width // 5 + width // 2, height // 3 + height // 2]
        form = "JPEG" if height > 500 else "PNG"
        data = drawn(height, width, box, orientation, form)
        for kernel in KERNELS:
            options = NormalizeOptions(image_size=64, resize_mode=mode, upscale=upscale, kernel=kernel, encoding="png")  # pyright: ignore[reportArgumentType]
            image, sample = moved(data, options, {"boxes": [float(side) for side in box]})
            found = found_in(decode_row(sample.image, options))
            boxes = decode_values(image.extra)["boxes"]
            assert isinstance(boxes, list) and found is not None
            assert np.abs(np.subtract(boxes, found)).max() <= 1, (height, width, orientation, options)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_a_files_own_pixels_are_turned_with_them(orientation: int) -> None:
    box = [30, 20, 70, 35]
    data = drawn(60, 120, box, orientation)
    with Image.open(io.BytesIO(data)) as stored:
        own, own_box = stored.size, found_in(np.asarray(stored))
    options = NormalizeOptions(image_size=120, resize_mode="pad", encoding="png")
    of_file = {"boxes": [float(side) for side in own_box or ()], ANNOTATED_SIZE: list(own)}
    of_upright = {"boxes": [float(side) for side in box], ANNOTATED_SIZE: [120, 60]}
    # Without an exchange of the sides, the size does not tell which was meant: it is the upright image.
    given = [of_file, of_upright] if orientation >= 5 else [of_upright]
    for values in given:
        image, _ = moved(data, options, values)
        assert decode_values(image.extra) == {"boxes": [30.0, 50.0, 70.0, 65.0]}


@pytest.mark.parametrize("orientation", range(5, 9))
def test_boxes_that_were_drawn_upright_are_not_turned(orientation: int) -> None:
    """As a tool does that shows the upright image, and writes the size of the file beside it."""
    data = drawn(60, 120, [30, 20, 70, 35], orientation)
    for box, is_refused in (([30, 20, 70, 35], True), ([30, 20, 50, 35], False), ([30, 20, 130, 35], False)):
        values = {"boxes": box, ANNOTATED_SIZE: [60, 120]}
        source = SourceImage("a.png", len(data), extra=encode_values(values))
        outcome = annotated(source, data, NormalizeOptions(image_size=120, resize_mode="pad"))
        assert isinstance(outcome, Rejection) == is_refused, box
        assert not isinstance(outcome, Rejection) or "and end outside of them" in outcome.detail


def test_boxes_of_an_image_of_another_size_are_refused() -> None:
    data = drawn(60, 120, [1, 1, 9, 9], 6)
    source = SourceImage("a.png", len(data), extra=encode_values({"boxes": [], ANNOTATED_SIZE: [240, 120]}))
    outcome = annotated(source, data, NormalizeOptions())
    assert isinstance(outcome, Rejection) and outcome.reason is RejectReason.ANNOTATED_SIZE
    assert outcome.detail == "its boxes are of 240x120 pixels; the image has 120x60"


def test_what_is_cut_off_is_clipped_or_dropped_and_labels_follow() -> None:
    # 40 x 20 becomes the 20 x 20 in its middle, doubled.
    data, options = drawn(20, 40, [0, 0, 1, 1]), NormalizeOptions(image_size=40, encoding="png")
    values = {
        "boxes": [0, 0, 9, 9, 5, 5, 15, 15, 20, 10, 25, 12, 12, 3, 12, 9],
        "box_labels": ["left", "edge", "middle", "empty"],
        "label": ["edge", "empty", "left", "middle"],
    }
    image, sample = moved(data, options, values)
    assert decode_values(image.extra) == {
        "boxes": [0.0, 10.0, 10.0, 30.0, 20.0, 20.0, 30.0, 24.0],
        "box_labels": ["edge", "middle"],
        "label": ["edge", "middle"],
    }
    assert sample.notes[-2:] == ("boxes_clipped", "boxes_dropped_2")


@pytest.mark.parametrize(
    ("boxes", "labels", "problem"),
    [
        ([[1, 2, 3]], None, "box 0 is [1, 2, 3], expected four numbers"),
        ([[1, 2, 3, float("nan")]], None, "expected four numbers"),
        ([[30, 30, 10, 10]], None, 'set boxes.format = "xywh"'),
        ([[0.1, 0.2, 0.3, 0.4]], None, "expected pixels, not shares of width and height"),
        ([[1, 2, 3, 4]], ["a", "b"], "1 boxes and 2 labels"),
        ([[1, 2, 3, 4]], [None], "a box without a label"),
    ],
)
def test_bad_boxes_say_what_is_wrong(boxes: list[Any], labels: list[Any] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=".*") as error:
        box_values(boxes, labels, "xyxy")
    assert problem in str(error.value)
